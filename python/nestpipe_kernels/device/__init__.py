"""Lanes (ordered queues of work) and the events that order work across them."""

from nestpipe_kernels.device.event import Event
from nestpipe_kernels.device.lane import Item, Lane, ThreadLane, create_lane
from nestpipe_kernels.device.priority import LoweredThreads

__all__ = ["Event", "Item", "Lane", "LoweredThreads", "ThreadLane", "create_lane"]
