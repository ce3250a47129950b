"""Lanes (ordered queues of work), the events that order work across them, and the devices they work on."""

from nestpipe_kernels.device.backend import CPU, DeviceBackend, DeviceEvent, backend_for, put_on
from nestpipe_kernels.device.event import Event
from nestpipe_kernels.device.lane import Item, Lane, StreamLane, ThreadLane, create_lane
from nestpipe_kernels.device.priority import LoweredThreads

__all__ = [
    "CPU",
    "DeviceBackend",
    "DeviceEvent",
    "Event",
    "Item",
    "Lane",
    "LoweredThreads",
    "StreamLane",
    "ThreadLane",
    "backend_for",
    "create_lane",
    "put_on",
]
