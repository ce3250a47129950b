"""Lanes on a device with streams: order by events alone, memory that crosses streams, devices that are not there."""

from __future__ import annotations

import math
from collections.abc import Iterator

import npu_cases as cases
import pytest

from gloo_world import GlooWorld
from nestpipe_kernels.device import CPU, Event, StreamLane, ThreadLane, backend_for, create_lane

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    made = GlooWorld(1)
    yield made
    made.close()


def test_a_stream_waits_for_the_event_of_another(world):
    assert world.call(cases.two_lanes, True) == [3.0] * 3


def test_without_the_event_the_stand_in_shows_rubbish(world):
    assert all(math.isnan(x) for x in world.call(cases.two_lanes, False))


def test_the_host_runs_ahead_until_it_synchronizes(world):
    assert world.call(cases.nothing_waits_for_the_device) == (False, True, [2.0, 2.0])


def test_memory_that_another_stream_uses_is_kept(world):
    assert world.call(cases.freed_too_early, True) == [2.0] * 3


def test_memory_without_a_word_about_its_use_is_used_again(world):
    assert all(math.isnan(x) for x in world.call(cases.freed_too_early, False))


def test_errors_travel_along_events(world):
    assert world.call(cases.errors) == ["broken", "broken", ""]


def test_devices_say_what_they_are(world):
    named, first, missing, lane, doctor = world.call(cases.devices)
    assert (named, first, lane) == ("StreamBackend('npu:0')", "npu:0", "StreamLane('copy' on npu:0)")
    assert missing == "device 'npu:3' is not here: torch_npu sees 1 devices; use device 'cpu'"
    assert "npu:0 (stand-in), torch_npu stand-in" in doctor


def test_torch_npu_is_absent():
    for device in ("npu", "npu:1"):
        with pytest.raises(
            RuntimeError, match=rf"device '{device}' needs torch_npu, .* install the torch_npu that fit"
        ):
            backend_for(device)


def test_the_cpu_has_threads_and_plain_events():
    lane = create_lane(CPU, "copy")
    assert isinstance(lane, ThreadLane)
    assert not isinstance(lane, StreamLane)
    assert type(CPU.event("x")) is Event
    lane.close()
