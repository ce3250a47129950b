"""Exchanges between ranks: one group per purpose, handles that own their tensors, time-outs everywhere."""

from nestpipe_kernels.comm.communicator import (
    PURPOSES,
    Communicator,
    LocalCommunicator,
    communicator_for,
    exchange_same,
)
from nestpipe_kernels.comm.device_group import DeviceCommunicator
from nestpipe_kernels.comm.gloo import GlooCommunicator
from nestpipe_kernels.comm.memory import InMemoryWorld
from nestpipe_kernels.comm.topology import SparseGroups, Topology

__all__ = [
    "PURPOSES",
    "Communicator",
    "DeviceCommunicator",
    "GlooCommunicator",
    "InMemoryWorld",
    "LocalCommunicator",
    "SparseGroups",
    "Topology",
    "communicator_for",
    "exchange_same",
]
