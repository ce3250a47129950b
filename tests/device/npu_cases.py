"""What the tests of stream lanes run in a process of its own, on the stand-in for an NPU."""

from __future__ import annotations

from typing import Any

import torch

import fake_npu
from nestpipe_kernels.device import DeviceEvent, backend_for, create_lane

LIMIT_S = 20.0


def _lanes(*names: str) -> Any:
    fake_npu.install()
    backend = backend_for("npu")
    return backend, *(create_lane(backend, name) for name in names)


def two_lanes(ordered: bool) -> list[float]:
    """One lane computes what the other reads on the host; `ordered`: it waits for the event."""
    backend, first, second = _lanes("first", "second")
    made, got = [], []
    issued, done = backend.event("issued"), backend.event("done")
    first.submit(lambda: made.append(torch.ones(3, device="npu") * 2), [], issued, "make")
    issued.wait_unless(None, LIMIT_S)
    second.submit(lambda: got.append((made[0] + 1).cpu().tolist()), [issued] if ordered else [], done, "read")
    done.wait(LIMIT_S)
    for lane in (first, second):
        lane.close(timeout_s=LIMIT_S)
    return got[0]


def nothing_waits_for_the_device() -> tuple[bool, bool, list[float]]:
    """Whether work had run: after its event was set and waited for; after `synchronize`; and what it gave."""
    backend, lane = _lanes("lane")
    made: list[Any] = []
    done = backend.event("done")
    lane.submit(lambda: made.append(torch.ones(2, device="npu") + 1), [], done, "make")
    done.wait(LIMIT_S)
    before = lane.stream.query()
    lane.synchronize(LIMIT_S)
    after = lane.stream.query()
    lane.close(timeout_s=LIMIT_S)
    return before, after, made[0].data_.tolist()


def freed_too_early(told: bool) -> list[float]:
    """A tensor of one lane that another uses, freed before the device has done so."""
    backend, first, second = _lanes("first", "second")
    kept: dict[str, Any] = {}
    made, used, freed = (backend.event(name) for name in ("made", "used", "freed"))

    def use() -> None:
        if told:
            backend.uses([kept["rows"]])
        kept["sum"] = kept["rows"] + 1

    first.submit(lambda: kept.update(rows=torch.ones(3, device="npu")), [], made, "make")
    second.submit(use, [made], used, "use")
    used.wait_unless(None, LIMIT_S)
    first.submit(lambda: kept.pop("rows"), [], freed, "free")
    first.synchronize(LIMIT_S)
    second.synchronize(LIMIT_S)
    for lane in (first, second):
        lane.close(timeout_s=LIMIT_S)
    return kept["sum"].data_.tolist()


def errors() -> list[str]:
    """What waiting for an item that failed, and for one that depended on it, raises; the lane goes on."""
    backend, first, second = _lanes("first", "second")
    events = [backend.event(name) for name in "abc"]

    def fail() -> None:
        raise ArithmeticError("broken")

    first.submit(fail, [], events[0], "fail")
    second.submit(lambda: None, [events[0]], events[1], "after")
    second.submit(lambda: None, [], events[2], "other")
    found = []
    for event in events:
        try:
            event.wait(LIMIT_S)
            found.append("")
        except ArithmeticError as error:
            found.append(str(error))
    assert isinstance(events[0], DeviceEvent)
    for lane in (first, second):
        lane.close(timeout_s=LIMIT_S)
    return found


def devices() -> list[str]:
    """What devices that are not there are answered with, and how the lane and its device show themselves."""
    fake_npu.install()
    found = [repr(backend_for("npu")), str(backend_for("npu:0").device)]
    try:
        backend_for("npu:3")
    except RuntimeError as error:
        found.append(str(error))
    lane = create_lane("npu", "copy")
    found.append(repr(lane))
    lane.close(timeout_s=LIMIT_S)
    from nestpipe_kernels.cli.doctor import examine

    found += [text for works, topic, text in examine() if topic == "devices" and works]
    return found
