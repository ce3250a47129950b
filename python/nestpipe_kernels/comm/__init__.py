"""Exchanges between ranks: one group per purpose, handles that own their tensors, time-outs everywhere."""

from nestpipe_kernels.comm.communicator import (
    PURPOSES,
    Communicator,
    LocalCommunicator,
    communicator_for,
    exchange_same,
)
from nestpipe_kernels.comm.gloo import GlooCommunicator
from nestpipe_kernels.comm.memory import InMemoryWorld

__all__ = [
    "PURPOSES",
    "Communicator",
    "GlooCommunicator",
    "InMemoryWorld",
    "LocalCommunicator",
    "communicator_for",
    "exchange_same",
]
