"""lookup_pool: native and reference give the same bits; gradients against autograd; faults; errors."""

from __future__ import annotations

import pytest
import torch
from row_cases import DIMS, MAX, MEAN, NONE, SUM, BagCase, bag_case, bits, native_threads

from nestpipe_kernels._native import core
from nestpipe_kernels.ops.lookup_pool import (
    pool_backward,
    pool_forward,
    pool_gradient_bound,
    pool_weight_grad,
    reference,
)

IMPLEMENTATIONS = ["native", "reference"]
MODES = [(SUM, False), (SUM, True), (MEAN, False), (MAX, False), (NONE, False), (NONE, True)]


def forward(case: BagCase, implementation: str = "native") -> list[torch.Tensor]:
    outs = case.outs()
    pool_forward(case.rows, *case.bags(), outs, case.weights, implementation=implementation)
    return outs


def backward(case: BagCase, implementation: str = "native", start: float = 0.0) -> torch.Tensor:
    accumulator = torch.full(case.rows.shape, start)
    pool_backward(case.grads, case.rows, *case.bags(), case.weights, accumulator, implementation=implementation)
    return accumulator


def assert_same_bits(case: BagCase) -> None:
    for ours, truth in zip(forward(case), forward(case, "reference")):
        assert torch.equal(bits(ours), bits(truth))
        assert not ours.isnan().any()
    assert torch.equal(bits(backward(case, start=0.5)), bits(backward(case, "reference", start=0.5)))


@pytest.mark.parametrize("size", [0, 1, 63, 1000])
@pytest.mark.parametrize(("mode", "weighted"), MODES)
def test_native_equals_reference(mode: int, weighted: bool, size: int) -> None:
    assert_same_bits(bag_case(size, [mode], size=size, dim=7, weighted=weighted))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_fault_10_any_dim_is_right(dim: int, slot_dtype: torch.dtype) -> None:
    assert_same_bits(bag_case(dim, [SUM, MEAN, MAX, NONE], size=40, dim=dim, slot_dtype=slot_dtype))
    assert_same_bits(bag_case(dim, [SUM, NONE], size=40, dim=dim, weighted=True, slot_dtype=slot_dtype))


def test_sum_order_of_a_row_with_several_blocks() -> None:
    """Hot rows: 2,500 and more occurrences, so that block sums matter, over two segments."""
    case = bag_case(5, [SUM, MEAN], size=3000, dim=5, num_rows=3)
    assert_same_bits(case)
    flat = reference.occurrence_gradients(case.grads, case.rows, _bags(case), 5)
    in_one_run = torch.zeros(5)
    for grad in flat[case.slots == 0]:
        in_one_run = in_one_run + grad
    assert not torch.equal(in_one_run, backward(case)[0]), "the case must tell blocks from one long run"


def _bags(case: BagCase) -> reference.Bags:
    return reference.Bags(case.slots, case.bag_offsets, tuple(case.segment_bags), tuple(case.segment_modes), None)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 2049])
def test_block_borders(count: int) -> None:
    grad = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    case = BagCase(
        torch.ones(1, 3),
        torch.zeros(count, dtype=torch.int32),
        torch.arange(count + 1),
        [0, count],
        [NONE],
        None,
        [grad],
    )
    expected = torch.zeros(3) + sum((reference.row_gradient(part) for part in grad.split(1024)), torch.zeros(3))
    assert torch.equal(bits(backward(case)[0]), bits(expected))


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize(("modes", "weighted"), [([SUM, MEAN, MAX, NONE], False), ([SUM, NONE], True)])
def test_threads_do_not_change_bits(threads: int, modes: list[int], weighted: bool) -> None:
    case = bag_case(1, modes, size=6000, dim=33, num_rows=900, weighted=weighted)
    results = []
    for count in (1, threads):
        with native_threads(count):
            results.append([*forward(case), backward(case)])
            if weighted:
                results[-1].append(pool_weight_grad(case.grads, case.rows, *case.bags()))
    for one, many in zip(*results):
        assert torch.equal(bits(one), bits(many))


@pytest.mark.parametrize("dim", [1, 8, 31, 64, 129, 300])
@pytest.mark.parametrize(("modes", "weighted"), [([SUM], False), ([SUM], True), ([MEAN], False)])
def test_instructions_do_not_change_bits(modes: list[int], weighted: bool, dim: int) -> None:
    case = bag_case(dim, modes, size=900, dim=dim, num_rows=20, weighted=weighted)
    here = [*forward(case), backward(case)]
    core().use_portable_sums(True)
    try:
        portable = [*forward(case), backward(case)]
    finally:
        core().use_portable_sums(False)
    truth = [*forward(case, "reference"), backward(case, "reference")]
    for a, b, c in zip(here, portable, truth):
        assert torch.equal(bits(a), bits(b)) and torch.equal(bits(a), bits(c))


@pytest.mark.parametrize("threads", [1, 4])
def test_many_parts_are_sorted_as_one(threads: int) -> None:
    """More occurrences than one thread's part of the sorting has, with padding and empty bags."""
    case = bag_case(8, [SUM, MEAN], size=40_000, dim=2, num_rows=300)
    with native_threads(threads):
        assert torch.equal(bits(backward(case)), bits(backward(case, "reference")))


@pytest.mark.parametrize(("mode", "weighted"), MODES)
def test_gradient_bound(mode: int, weighted: bool) -> None:
    case = bag_case(3, [mode, SUM] if mode != NONE else [NONE], size=500, dim=9, num_rows=4, weighted=weighted)
    arguments = case.grads, *case.bags(), case.weights, 9
    bound = pool_gradient_bound(*arguments)
    assert bound == pool_gradient_bound(*arguments, implementation="reference")
    assert float(backward(case).abs().max()) <= bound < 1e9
    for bad in (float("nan"), float("inf"), -float("inf")):
        case.grads[-1][2, 3] = bad
        assert pool_gradient_bound(*arguments) == float("inf")
        assert pool_gradient_bound(*arguments, implementation="reference") == float("inf")


def test_gradient_bound_of_nothing_and_of_weights() -> None:
    case = bag_case(3, [SUM], size=50, dim=2, weighted=True)
    assert pool_gradient_bound([None], *case.bags(), None, 2) == 0.0
    case.weights[7] = float("nan")
    for implementation in IMPLEMENTATIONS:
        assert pool_gradient_bound(case.grads, *case.bags(), case.weights, 2, implementation=implementation) == float(
            "inf"
        )


@pytest.mark.parametrize(("mode", "name"), [(SUM, "sum"), (MEAN, "mean"), (MAX, "max")])
def test_forward_against_torch(mode: int, name: str) -> None:
    case = bag_case(2, [mode], size=200, dim=9, padding=0.0)
    truth = torch.nn.functional.embedding_bag(case.slots, case.rows.double(), case.bag_offsets[:-1], mode=name)
    # float32 sums of at most 8 terms of size ~1: a few ulp
    torch.testing.assert_close(forward(case)[0].double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "weighted"), MODES)
def test_gradients_against_float64_autograd(mode: int, weighted: bool) -> None:
    case = bag_case(3, [mode], size=300, dim=5, weighted=weighted)
    rows = case.rows.double().requires_grad_()
    weights = None if case.weights is None else case.weights.double().requires_grad_()
    picked = rows[case.slots.clamp(min=0)]
    out = reference.pool(picked, case.bag_offsets, mode, weights, case.slots >= 0)
    out.backward(case.grads[0].double())
    # sums of about 100 terms of size ~1
    torch.testing.assert_close(backward(case).double(), rows.grad, rtol=1e-5, atol=2e-5)
    if weights is not None:
        ours = pool_weight_grad(case.grads, case.rows, *case.bags())
        torch.testing.assert_close(ours.double(), weights.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_weight_gradient_native_equals_reference(dim: int) -> None:
    case = bag_case(dim, [SUM, NONE, SUM], size=50, dim=dim, weighted=True)
    case.grads[2] = None
    native, plain = (pool_weight_grad(case.grads, case.rows, *case.bags(), implementation=i) for i in IMPLEMENTATIONS)
    assert torch.equal(bits(native), bits(plain))
    assert torch.equal(bits(native[case.slots < 0]), torch.zeros(int((case.slots < 0).sum()), dtype=torch.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_rows_that_occur_are_touched(implementation: str) -> None:
    case = bag_case(4, [SUM], size=20, num_rows=100)
    accumulator = backward(case, implementation, start=torch.nan)
    accumulator[:] = torch.where(torch.isin(torch.arange(100), case.slots)[:, None], 0.0, torch.nan)
    pool_backward(case.grads, None, *case.bags(), None, accumulator, implementation=implementation)
    occurs = torch.isin(torch.arange(100), case.slots)
    assert not accumulator[occurs].isnan().any()
    assert accumulator[~occurs].isnan().all()


@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_missing_gradient_is_zero(mode: int) -> None:
    case = bag_case(6, [mode, SUM, mode], size=3000, dim=3, num_rows=4)
    case.grads[1] = None
    ours = backward(case)
    assert torch.equal(bits(ours), bits(backward(case, "reference")))
    case.grads[1] = torch.zeros(case.segment_bags[2] - case.segment_bags[1], 3)
    assert torch.equal(bits(ours), bits(backward(case)))
    case.grads = [None, None, None]
    assert torch.equal(bits(backward(case)), torch.zeros(4, 3, dtype=torch.int32))


def test_strided_gradients_are_taken_as_they_are() -> None:
    case = bag_case(7, [SUM, MEAN], size=30, dim=4)
    plain = [grad.clone() for grad in case.grads]
    case.grads = [plain[0].t().contiguous().t(), torch.ones(1, 1).expand(plain[1].shape)]
    ours = backward(case)
    case.grads = [plain[0], torch.ones_like(plain[1])]
    assert torch.equal(bits(ours), bits(backward(case)))


def test_maximum_keeps_the_first_of_equal_values_and_shows_nan() -> None:
    rows = torch.tensor([[1.0, -0.0], [1.0, 0.0], [torch.nan, -1.0], [2.0, torch.nan]])
    case = BagCase(
        rows, torch.tensor([0, 1, 1, 0, 2, 3]), torch.tensor([0, 2, 4, 6]), [0, 3], [MAX], None, [torch.ones(3, 2)]
    )
    expected = torch.tensor([[1.0, -0.0], [1.0, 0.0], [torch.nan, torch.nan]])
    for implementation in IMPLEMENTATIONS:
        assert torch.equal(bits(forward(case, implementation)[0]), bits(expected))
        assert backward(case, implementation).tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize("offsets", [[0, 1, 1, 3, 3, 4, 5], [0, 1, 5, 5]])
def test_fault_1_empty_bags_are_zero(implementation: str, mode: int, offsets: list[int]) -> None:
    bags = len(offsets) - 1
    grad = torch.ones(bags, 3)
    case = BagCase(torch.randn(5, 3), torch.arange(5), torch.tensor(offsets), [0, bags], [mode], None, [grad])
    out = forward(case, implementation)[0]
    empty = case.bag_offsets.diff() == 0
    assert empty.any()
    assert torch.equal(bits(out[empty]), torch.zeros(int(empty.sum()), 3, dtype=torch.int32))
    assert out.isfinite().all()
    grad[empty] = torch.nan
    assert backward(case, implementation).isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 3], r"bag_offsets must end at the number of slots \(7\), got 3"),
        ([0, 3, 2, 7], "bag_offsets must not decrease, got 3 then 2 at position 2"),
        ([1, 3, 7], "bag_offsets must start at 0, got 1"),
        ([0], r"bag_offsets must end at the number of slots \(7\), got 0"),
        ([], "bag_offsets must have at least the entry 0, got none"),
    ],
)
def test_faults_2_to_4_bad_offsets(implementation: str, mode: int, offsets: list[int], message: str) -> None:
    slots = torch.tensor([0, 1, 0, 2, 3, 4, 6])
    bags = max(len(offsets) - 1, 0)
    outs = [torch.full((bags, 2), 7.0)]
    with pytest.raises(ValueError, match=message):
        pool_forward(
            torch.randn(7, 2),
            slots,
            torch.tensor(offsets, dtype=torch.int64),
            [0, bags],
            [mode],
            outs,
            implementation=implementation,
        )
    assert (outs[0] == 7.0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX, NONE])
def test_fault_4_no_ids_and_no_bags(implementation: str, mode: int) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    case = BagCase(
        torch.empty(0, 4), nothing, torch.zeros(1, dtype=torch.int64), [0, 0], [mode], None, [torch.empty(0, 4)]
    )
    assert forward(case, implementation)[0].shape == (0, 4)
    assert backward(case, implementation).shape == (0, 4)
    case = BagCase(torch.empty(0, 4), nothing, torch.zeros(1, dtype=torch.int64), [0], [], None, [])
    assert forward(case, implementation) == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_equal_maxima_gets_the_gradient(implementation: str, first: int) -> None:
    """Equal values in different rows, signed zeros and NaNs among them."""
    rows = torch.tensor([[3.0, 0.0, -0.0, torch.nan, 1.0], [3.0, -0.0, 0.0, torch.nan, 2.0]])
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    slots, offsets = torch.tensor([-1, first, 1 - first]), torch.tensor([0, 3])
    case = BagCase(rows, slots, offsets, [0, 1], [MAX], None, [grad])
    expected = torch.zeros(2, 5)
    expected[first, :4], expected[1, 4] = grad[0, :4], 5.0
    assert torch.equal(backward(case, implementation), expected)
    assert torch.equal(bits(forward(case, implementation)[0][0, :4]), bits(rows[first, :4]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fault_8_padding_has_no_row_no_count_and_no_gradient(implementation: str) -> None:
    slots = torch.full((1000,), -1)
    slots[::8] = torch.arange(125) % 5
    grad = torch.ones(100, 3)
    for mode in (SUM, MEAN, MAX):
        case = BagCase(torch.ones(6, 3), slots, torch.arange(0, 1001, 10), [0, 100], [mode], None, [grad])
        out = forward(case, implementation)[0]
        count = (slots.view(100, 10) >= 0).sum(1)[:, None].float()
        assert torch.equal(out, count.expand(100, 3) if mode == SUM else (count > 0).float().expand(100, 3))
        accumulator = backward(case, implementation, start=0.25)
        assert torch.equal(accumulator[5], torch.full((3,), 0.25))
    only_padding = BagCase(
        torch.ones(1, 3), torch.full((800,), -1), torch.arange(801), [0, 800], [NONE], None, [torch.ones(800, 3)]
    )
    assert torch.equal(bits(forward(only_padding, implementation)[0]), torch.zeros(800, 3, dtype=torch.int32))
    assert torch.equal(backward(only_padding, implementation), torch.zeros(1, 3))


def test_faults_17_to_19_gradients_reach_their_own_row_only() -> None:
    """[0, 0, 2] sums; a missing key (-1) shifts nobody's gradient; rows, not positions, receive."""
    grad = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    case = BagCase(torch.zeros(4, 1), torch.tensor([0, -1, 0, 2]), torch.arange(5), [0, 4], [NONE], None, [grad])
    assert backward(case).flatten().tolist() == [101.0, 0.0, 1000.0, 0.0]


def test_faults_24_25_hot_keys_repeat_bitwise() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 100_000
    slots = torch.randint(0, 10, (n,), generator=generator)
    grad = torch.randn(n, 2, generator=generator)
    case = BagCase(torch.zeros(10, 2), slots, torch.arange(n + 1), [0, n], [NONE], None, [grad])
    first = backward(case)
    for _ in range(3):
        assert torch.equal(bits(first), bits(backward(case)))
    torch.testing.assert_close(
        first.double(), torch.zeros(10, 2).double().index_add(0, slots, grad.double()), rtol=1e-3, atol=1e-3
    )


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [-2, 5, 2**40])
def test_slot_outside_rows(implementation: str, bad: int) -> None:
    outs = [torch.full((1, 2), 7.0)]
    with pytest.raises(IndexError, match=rf"slots must lie in \[-1, 5\) where -1 is padding, got {bad} at position 2"):
        pool_forward(
            torch.randn(5, 2),
            torch.tensor([0, -1, bad, 9]),
            torch.tensor([0, 4]),
            [0, 1],
            [SUM],
            outs,
            implementation=implementation,
        )
    assert (outs[0] == 7.0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_errors_of_segments_and_weights(implementation: str) -> None:
    def call(modes: list[int], offsets: list[int], weights: torch.Tensor | None = None, bags: int = 2) -> None:
        outs = [torch.empty(2, 3)]
        arguments = (torch.randn(5, 3), torch.arange(3), torch.tensor(offsets), [0, bags], modes, outs, weights)
        pool_forward(*arguments, implementation=implementation)

    with pytest.raises(ValueError, match="pooling none needs exactly one occurrence per bag, got 2 in bag 1"):
        call([NONE], [0, 1, 3])
    with pytest.raises(ValueError, match="per-sample weights need pooling sum or none, got mean for segment 0"):
        call([MEAN], [0, 1, 3], torch.ones(3))
    with pytest.raises(ValueError, match="per-sample weights need pooling sum or none, got max for segment 0"):
        call([MAX], [0, 1, 3], torch.ones(3))
    with pytest.raises(ValueError, match=r"segment_modes must be 0 \(sum\).*got 4 for segment 0"):
        call([4], [0, 1, 3])
    with pytest.raises(ValueError, match=r"segment_bags must end at the number of bags \(3\), got 2"):
        call([SUM], [0, 1, 2, 3])
    case = bag_case(0, [MEAN])
    with pytest.raises(ValueError, match="gradients of weights need pooling sum or none"):
        pool_weight_grad(case.grads, case.rows, *case.bags(), implementation=implementation)
    case = bag_case(0, [MAX])
    accumulator = torch.zeros(case.rows.shape)
    with pytest.raises(ValueError, match="pooling max needs `rows` in backward, got none"):
        pool_backward(case.grads, None, *case.bags(), None, accumulator, implementation=implementation)


def test_errors_of_types_and_shapes() -> None:
    rows, slots, offsets, outs = torch.randn(5, 3), torch.arange(3), torch.tensor([0, 3]), [torch.empty(1, 3)]
    rest = ([0, 1], [SUM], outs)
    with pytest.raises(
        ValueError, match="lookup_pool: unknown implementation 'fast': choose native, triton or reference"
    ):
        pool_forward(rows, slots, offsets, *rest, implementation="fast")
    with pytest.raises(TypeError, match=r"rows must be a float32 CPU tensor, got float64 on cpu \(shape \[5, 3\]\)"):
        pool_forward(rows.double(), slots, offsets, *rest)
    with pytest.raises(ValueError, match=r"rows must be contiguous along its last dimension.*call \.contiguous\(\)"):
        pool_forward(torch.randn(3, 5).t(), slots, offsets, *rest)
    with pytest.raises(TypeError, match="slots must be an int32 or int64 CPU tensor, got float32"):
        pool_forward(rows, slots.float(), offsets, *rest)
    with pytest.raises(ValueError, match="slots must be a vector"):
        pool_forward(rows, slots[None], offsets, *rest)
    with pytest.raises(TypeError, match="bag_offsets must be an int64 CPU tensor, got int32"):
        pool_forward(rows, slots, offsets.int(), *rest)
    with pytest.raises(TypeError, match="weights must be a float32 CPU tensor, got float64"):
        pool_forward(rows, slots, offsets, *rest, torch.ones(3).double())
    with pytest.raises(ValueError, match=r"weights must have the shape of slots \[3\], got \[2\]"):
        pool_forward(rows, slots, offsets, *rest, torch.ones(2))
    with pytest.raises(ValueError, match=r"segment_bags must have one entry more than segment_modes \(1\), got 1"):
        pool_forward(rows, slots, offsets, [0], [SUM], outs)
    with pytest.raises(ValueError, match=r"outs must have one matrix per segment \(1\), got 0"):
        pool_forward(rows, slots, offsets, [0, 1], [SUM], [])
    with pytest.raises(ValueError, match=r"outs\[0\] must have shape \[1, 3\], got \[1, 4\]"):
        pool_forward(rows, slots, offsets, [0, 1], [SUM], [torch.empty(1, 4)])
    backward_rest = (slots, offsets, [0, 1], [SUM], None)
    with pytest.raises(TypeError, match=r"grads\[0\] must be a float32 CPU tensor, got float64"):
        pool_backward([torch.ones(1, 3).double()], None, *backward_rest, torch.zeros(5, 3))
    with pytest.raises(TypeError, match=r"grads\[0\] must be a float32 CPU tensor, got float16"):
        pool_backward([torch.ones(1, 3).half()], None, *backward_rest, torch.zeros(5, 3))
    with pytest.raises(ValueError, match="accumulator must be contiguous"):
        pool_backward([None], None, *backward_rest, torch.zeros(5, 6)[:, :3])
    with pytest.raises(ValueError, match=r"rows and accumulator must have the same shape, got \[5, 3\] and \[4, 3\]"):
        pool_backward([None], rows, *backward_rest, torch.zeros(4, 3))
