"""Models of DeepCTR-Torch, torch-rechub and TorchRec, converted as they come, train as they did, in any schedule."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nestpipe_kernels as nk
from nestpipe_kernels import optim
from nestpipe_kernels.testing.threads import run_ranks_as_threads
from third_party import library

STEPS, SAMPLES, SIZE, DIM = 50, 12, 15, 4
LR = 0.05
SEEDING = threading.Lock()  # ranks are threads, with one generator


class Case:
    """A model, its batches and its loss. `micro_batches` is 1 where batch normalisation couples the samples."""

    micro_batches = 2
    double = True
    """Whether it can run in float64."""

    def model(self) -> Any:
        raise NotImplementedError

    def batch(self, ids: torch.Tensor, dense: torch.Tensor) -> Any:
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> Any:
        inputs, label = batch
        out = model(inputs).squeeze(-1)
        return F.binary_cross_entropy(out, label), out

    def batches(self, seed: int, steps: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(1, SIZE, (SAMPLES, 8), generator=generator)
            label = torch.randint(0, 2, (SAMPLES,), generator=generator).float()
            yield self.batch(ids, torch.rand(SAMPLES, 2, generator=generator)), label


class DeepCTR(Case):
    """Ids are columns of one float matrix; L2 terms run over all rows of the tables."""

    name = "DeepFM"

    def model(self):
        inputs, models = library("deepctr_torch.inputs"), library("deepctr_torch.models")
        columns = [inputs.SparseFeat(f"C{k}", SIZE, DIM) for k in range(2)] + [inputs.DenseFeat("I", 2)]
        return getattr(models, self.name)(columns, columns, dnn_hidden_units=(8,), l2_reg_embedding=1e-3, device="cpu")

    def batch(self, ids, dense):
        return torch.cat([ids[:, :2].float(), dense], 1)

    def loss(self, model, batch):
        loss, out = super().loss(model, batch)
        return loss + model.get_regularization_loss().sum(), out


class XDeepFM(DeepCTR):
    name = "xDeepFM"


class DeepCTRDIN(DeepCTR):
    """Attention over a history whose items share the target's table."""

    def model(self):
        inputs, models = library("deepctr_torch.inputs"), library("deepctr_torch.models")
        history = inputs.SparseFeat("hist_item", SIZE, DIM, embedding_name="item")
        columns = [inputs.SparseFeat("user", SIZE, DIM), inputs.SparseFeat("item", SIZE, DIM)]
        columns.append(inputs.VarLenSparseFeat(history, maxlen=5, length_name="length"))
        return models.DIN(
            columns, ["item"], dnn_hidden_units=(8,), att_hidden_size=(8,), att_activation="sigmoid", device="cpu"
        )

    def batch(self, ids, dense):
        length = ids[:, 7:] % 5 + 1
        return torch.cat([ids[:, :2], ids[:, 2:7] * (torch.arange(5) < length), length], 1).float()


class Rechub(Case):
    """Batches are dicts; a batch normalisation."""

    micro_batches = 1

    def features(self):
        return library("torch_rechub.basic.features")

    def model(self):
        kinds = self.features()
        sparse = [kinds.SparseFeature(f"s{k}", SIZE, DIM) for k in range(2)]
        return library("torch_rechub.models.ranking").WideDeep(
            [*sparse, kinds.DenseFeature("d")], sparse, {"dims": [8], "dropout": 0.0, "activation": "relu"}
        )

    def batch(self, ids, dense):
        return {"s0": ids[:, 0], "s1": ids[:, 1], "d": dense[:, 0]}


class RechubDIN(Rechub):
    def model(self):
        kinds = self.features()
        single = [kinds.SparseFeature("user", SIZE, DIM), kinds.SparseFeature("item", SIZE, DIM, padding_idx=0)]
        history = [kinds.SequenceFeature("hist", SIZE, DIM, pooling="concat", shared_with="item", padding_idx=0)]
        attention = {"dims": [8], "activation": "sigmoid", "use_softmax": False}
        return library("torch_rechub.models.ranking").DIN(
            single, history, single[1:], {"dims": [8], "dropout": 0.0}, attention
        )

    def batch(self, ids, dense):
        return {"user": ids[:, 0], "item": ids[:, 1], "hist": ids[:, 2:] * (ids[:, 2:] > 3)}


class RechubSASRec(Rechub):
    """Self-attention; positions are made by numpy; lookups are changed in place."""

    micro_batches = 2

    def model(self):
        kinds = self.features()
        shared = {"pooling": "concat", "shared_with": "seq"}
        features = [kinds.SequenceFeature("seq", SIZE, DIM, pooling="concat")]
        features += [kinds.SequenceFeature(name, SIZE, DIM, **shared) for name in ("pos_item", "neg_item")]
        return library("torch_rechub.models.matching").SASRec(features, max_len=6, dropout_rate=0.0, num_blocks=1)

    def batch(self, ids, dense):
        return {"seq": ids[:, :6] * (ids[:, :6] > 3), "pos_item": ids[:, 1:7], "neg_item": ids[:, 2:8]}

    def loss(self, model, batch):
        positive, negative = model(batch[0])
        return F.softplus(negative - positive).mean(), positive


class TorchRec(Case):
    """Batches are a dense matrix and a KeyedJaggedTensor; a collection."""

    double = False

    def collection(self):
        torchrec = library("torchrec")
        tables = [
            torchrec.EmbeddingBagConfig(name=f"t{k}", embedding_dim=DIM, num_embeddings=SIZE, feature_names=[f"f{k}"])
            for k in range(2)
        ]
        return torchrec.EmbeddingBagCollection(tables=tables)

    def model(self):
        return library("torchrec.models.dlrm").DLRM(self.collection(), 2, [8, DIM], [8, 1])

    def batch(self, ids, dense):
        lengths = ids[:, :2].t().reshape(-1) % 4
        values = ids.repeat(1, 2)[:, : int(lengths.sum())].reshape(-1)[: int(lengths.sum())]
        return {"dense": dense, "sparse": library("torchrec").KeyedJaggedTensor(["f0", "f1"], values, lengths=lengths)}

    def loss(self, model, batch):
        inputs, label = batch
        out = model(dense_features=inputs["dense"], sparse_features=inputs["sparse"]).squeeze(-1)
        return F.binary_cross_entropy_with_logits(out, label), out


class TorchRecDeepFM(TorchRec):
    def model(self):
        return library("torchrec.models.deepfm").SimpleDeepFMNN(2, self.collection(), 8, 4)

    def loss(self, model, batch):
        out = super().loss(model, batch)[1]  # the model ends with a sigmoid
        return F.binary_cross_entropy(out, batch[1]), out


CASES = [DeepCTR, XDeepFM, DeepCTRDIN, Rechub, RechubDIN, RechubSASRec, TorchRec, TorchRecDeepFM]


def start(case):
    with SEEDING:
        torch.manual_seed(1)
        model = case.model()
        for name, value in model.named_parameters():
            if "emb" in name:
                value.data.uniform_(-0.5, 0.5)  # some libraries start so near zero that nothing is learned
    return model


def plain(case, dtype):
    model = start(case).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in case.batches(0, STEPS):
        optimizer.zero_grad()
        case.loss(model, in_dtype(batch, dtype))[0].backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def in_dtype(tree, dtype):
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: in_dtype(value, dtype) for key, value in tree.items()}
    return tuple(in_dtype(item, dtype) for item in tree) if isinstance(tree, tuple) else tree


def converted(case, schedule, steps, communicator=None, rank=0, rule=None):
    model = start(case)
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    nk.convert(model, rule or optim.SGD(lr=LR), process_group=communicator)
    assert list(model.state_dict()) == keys
    dense = torch.optim.SGD(model.parameters(), lr=LR)
    config = nk.PipelineConfig(schedule=schedule, num_micro_batches=case.micro_batches, timeout_s=30.0)
    with nk.NestedPipeline(model, dense, case.loss, config) as pipeline:
        losses = [float(step.loss) for step in pipeline.run(case.batches(rank, steps))]
    state = copy.copy(model.state_dict())
    return losses, {name: state[name] for name in names}


def rms(pairs):
    squares = torch.cat([(a.double() - b.double()).square().reshape(-1) for a, b in pairs])
    return float(squares.mean().sqrt())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_trains_as_the_unconverted_model(case):
    case = case()
    single = plain(case, torch.float32)
    losses, found = converted(case, "nested", STEPS)
    assert losses[-1] != losses[0]
    if not case.double:
        for name, value in single.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        return
    exact = plain(case, torch.float64)
    ulp = rms([(value, torch.zeros_like(value)) for value in exact.values()]) * torch.finfo(torch.float32).eps
    ours, torchs = (rms([(state[name], exact[name]) for name in exact]) for state in (found, single))
    assert ours <= 2 * torchs + ulp


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_schedules_are_alike(case, world_size):
    case = case()

    def run(schedule):
        def body(rank, communicator):
            return converted(case, schedule, 5, communicator, rank, optim.Adam(lr=0.05))

        return run_ranks_as_threads(world_size, body)

    for (losses, state), (other_losses, other) in zip(run("sequential"), run("nested")):
        assert losses == other_losses
        assert all(torch.equal(state[name], other[name]) for name in state)
