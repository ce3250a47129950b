"""Lanes and events: order, errors that travel, closing, forks."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref

import pytest
import torch

from nestpipe_kernels.device import Event, Item, ThreadLane, create_lane
from nestpipe_kernels.trace import Timeline

LIMIT_S = 20.0


@pytest.fixture
def lane():
    made = ThreadLane("copy")
    yield made
    made.close(cancel=True, timeout_s=LIMIT_S)


def test_event_outcomes():
    event = Event("gather 3")
    assert not event.is_set()
    with pytest.raises(TimeoutError, match=r"event 'gather 3' was not set within 0 s"):
        event.wait(0)
    event.set()
    event.wait(0)
    with pytest.raises(RuntimeError, match="event 'gather 3' is already set"):
        event.set_error(ValueError("x"))

    failed = Event()
    cause = ValueError("bad id")
    failed.set_error(cause)
    with pytest.raises(ValueError, match="bad id") as caught:
        failed.wait(0)
    assert caught.value is cause
    assert failed.error is cause


def test_event_wakes_a_waiting_thread_and_publishes_data():
    event, box, seen = Event(), [], []

    def wait() -> None:
        event.wait()  # without a limit, which would hide that nobody wakes it
        seen.extend(box)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    box.append(7)
    event.set()
    thread.join(LIMIT_S)
    assert seen == [7]


def test_items_run_in_order_even_if_a_later_one_is_ready(lane):
    order: list[str] = []
    gate, first, second = Event(), Event(), Event()
    lane.submit(lambda: order.append("first"), [gate], first, "first")
    lane.submit(lambda: order.append("second"), [], second, "second")
    with pytest.raises(TimeoutError):
        second.wait(0.05)
    gate.set()
    second.wait(LIMIT_S)
    assert order == ["first", "second"]
    assert first.is_set()


def test_a_poke_makes_a_waiter_look_again_and_only_the_first_outcome_counts():
    event, cancelled, results = Event("gather"), threading.Event(), []
    looked = threading.Semaphore(0)

    def look() -> bool:
        looked.release()
        return cancelled.is_set()

    threads = [threading.Thread(target=lambda: results.append(event.wait_unless(look)), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert looked.acquire(timeout=LIMIT_S)
    event.poke()  # nothing has changed: they wait on, each for itself
    cancelled.set()
    event.poke()
    for thread in threads:
        thread.join(LIMIT_S)
    assert results == [False] * 3
    assert event.try_set()
    assert not event.try_set(ValueError("late"))
    assert event.error is None
    assert event.wait_unless(look)


def test_items_given_together_keep_their_order_and_are_queued_all_or_none(lane):
    order: list[int] = []
    events = [Event() for _ in range(4)]
    lane.submit_all([Item(lambda k=k: order.append(k), (), event, "append") for k, event in enumerate(events)])
    events[-1].wait(LIMIT_S)
    assert order == [0, 1, 2, 3]
    fresh = Event()
    with pytest.raises(ValueError, match="the event for 'twice' is already set"):
        lane.submit_all([Item(lambda: order.append(9), (), fresh, "once"), Item(lambda: None, (), events[0], "twice")])
    lane.synchronize(LIMIT_S)
    assert order == [0, 1, 2, 3]
    assert not fresh.is_set()


def test_error_travels_through_events_and_lanes_but_not_to_independent_items(lane):
    other = ThreadLane("comm")
    cause = ValueError("row 3")
    ran: list[str] = []

    def fail() -> None:
        raise cause

    failed, dependent, far, independent = Event(), Event(), Event(), Event()
    lane.submit(fail, [], failed, "fail")
    other.submit(lambda: ran.append("dependent"), [failed], dependent, "dependent")
    lane.submit(lambda: ran.append("far"), [dependent], far, "far")
    lane.submit(lambda: ran.append("independent"), [], independent, "independent")
    independent.wait(LIMIT_S)
    with pytest.raises(ValueError) as caught:
        far.wait(LIMIT_S)
    assert caught.value is cause
    assert ran == ["independent"]
    other.close(timeout_s=LIMIT_S)


def test_an_event_that_was_failed_from_outside_keeps_its_error_and_the_lane_goes_on(lane):
    gate, done, after = Event(), Event(), Event()
    lane.submit(lambda: None, [gate], done, "given up")
    assert done.try_set(TimeoutError("given up"))
    assert not done.try_set()
    gate.set()
    lane.submit(lambda: None, [], after, "after")
    after.wait(LIMIT_S)
    with pytest.raises(TimeoutError, match="given up"):
        done.wait(0)


def test_lane_thread_has_no_autograd_and_a_readable_name(lane):
    seen: list[object] = []
    done = Event()
    lane.submit(lambda: seen.extend([torch.is_grad_enabled(), threading.current_thread().name]), [], done, "look")
    done.wait(LIMIT_S)
    assert seen == [False, "nestpipe-copy"]
    assert torch.is_grad_enabled()


def test_closures_are_released_before_the_next_item(lane):
    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    first, second = Event(), Event()
    states: list[bool] = []
    lane.submit(lambda held=payload: None, [], first, "hold")
    del payload
    lane.submit(lambda: states.append(alive() is None), [first], second, "look")
    second.wait(LIMIT_S)
    assert states == [True]


def test_synchronize_and_close_finish_the_queue():
    lane = ThreadLane("copy")
    ran: list[int] = []
    gate = Event()
    for i in range(5):
        lane.submit(lambda i=i: ran.append(i), [gate], Event(), "append")
    with pytest.raises(TimeoutError, match=r"lane 'copy' was not done within 0\.05 s"):
        lane.synchronize(0.05)
    with pytest.raises(TimeoutError, match=r"lane 'copy' has not ended within 0\.05 s"):
        lane.close(timeout_s=0.05)
    gate.set()
    lane.close(timeout_s=LIMIT_S)
    lane.close(timeout_s=LIMIT_S)
    lane.synchronize(LIMIT_S)
    assert ran == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="lane 'copy' is closed; 'late' was not queued"):
        lane.submit(lambda: None, [], Event(), "late")


def test_close_with_cancel_ends_a_wait_and_fails_what_did_not_run():
    lane = ThreadLane("copy")
    never, waiting, queued = Event("never"), Event(), Event()
    ran: list[str] = []
    lane.submit(lambda: ran.append("waiting"), [never], waiting, "waiting")
    lane.submit(lambda: ran.append("queued"), [], queued, "queued")
    lane.close(cancel=True, timeout_s=LIMIT_S)
    with pytest.raises(RuntimeError, match="lane 'copy' was closed; 'waiting' did not run"):
        waiting.wait(0)
    with pytest.raises(RuntimeError, match="'queued' did not run"):
        queued.wait(0)
    assert ran == []


def test_misuse_is_refused(lane):
    done = Event()
    done.set()
    with pytest.raises(ValueError, match="the event for 'twice' is already set"):
        lane.submit(lambda: None, [], done, "twice")
    own = Event()
    lane.submit(lane.synchronize, [], own, "self")
    with pytest.raises(RuntimeError, match=r"synchronize\(\) on the lane's own thread would wait for itself"):
        own.wait(LIMIT_S)


def test_create_lane():
    lane = create_lane("cpu", "retrieval")
    assert lane.name == "retrieval"
    lane.close(timeout_s=LIMIT_S)
    with pytest.raises(RuntimeError, match="device 'npu' needs torch_npu"):
        create_lane("npu", "copy")
    with pytest.raises(ValueError, match="unknown device 'tpu'; expected 'cpu', 'cuda', 'npu'"):
        create_lane("tpu", "copy")


def test_items_with_a_batch_are_recorded():
    timeline = Timeline()
    lane = ThreadLane("copy", timeline)
    lane.submit(lambda: None, [], Event(), "gather", batch=3, micro=1, kind="lookup")
    lane.submit(lambda: None, [], Event(), "unrecorded")
    lane.close(timeout_s=LIMIT_S)
    (span,) = timeline.to_events()
    assert (span.lane, span.stage, span.batch, span.micro, span.kind) == ("copy", "gather", 3, 1, "lookup")
    assert span.end_ns >= span.start_ns


def _use_in_child(lane: ThreadLane, event: Event, results) -> None:
    messages = []
    for use in (lambda: lane.submit(lambda: None, [], Event(), "x"), lambda: lane.synchronize(1.0), event.wait):
        try:
            use()
        except RuntimeError as error:
            messages.append(str(error))
    lane.close()
    results.put(messages)


@pytest.mark.multiprocess
def test_a_forked_child_gets_an_error_instead_of_a_hang(lane):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_use_in_child, args=(lane, Event("pending"), results))
    child.start()
    messages = results.get(timeout=LIMIT_S)
    child.join(LIMIT_S)
    assert child.exitcode == 0
    assert len(messages) == 3
    assert f"the lane's thread lives in process {os.getpid()}" in messages[0]
    assert "create lanes (and pipelines) after the fork" in messages[1]
    assert "event 'pending' belongs to process" in messages[2]


def test_lanes_use_one_torch_thread_and_leave_the_callers_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lane, seen, done = ThreadLane("narrow"), [], Event()
        lane.submit(lambda: seen.append(torch.get_num_threads()), (), done, "look")
        done.wait(10)
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        lane.close()
        assert (seen, later, torch.get_num_threads()) == ([1], [2], 2)
    finally:
        torch.set_num_threads(before)
