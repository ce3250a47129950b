"""Every error of this package that is not a plain ValueError, TypeError or IndexError."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CommunicationError",
    "GraphError",
    "NestPipeError",
    "NonFiniteGradientError",
    "RemoteRankError",
    "StoreFullError",
]


class NestPipeError(Exception):
    """Base class of this package's errors."""


class CaptureError(NestPipeError, ValueError):
    """An embedding input of the model cannot be derived from the batch; names module and remedy."""


class CheckpointError(NestPipeError, ValueError):
    """A checkpoint that is damaged, incomplete, of a newer format or another model; names file, expected and got."""


class CommunicationError(NestPipeError, RuntimeError):
    """A collective timed out, lost a peer, or peers disagree on sizes."""


class GraphError(NestPipeError, ValueError):
    """A stage graph has conflicting accesses without a path, a redundant edge or a cycle."""


class NonFiniteGradientError(NestPipeError, ArithmeticError):
    """A gradient is NaN, infinite, or too large to be summed over ranks; names tables and keys, or the dense part."""


class RemoteRankError(NestPipeError, RuntimeError):
    """Another rank failed; carries its rank, stage, batch index (-1: outside of batches) and message."""

    def __init__(self, rank: int, stage: str, batch: int, message: str) -> None:
        of_batch = f" of batch {batch}" if batch >= 0 else ""
        super().__init__(f"rank {rank} failed in {stage}{of_batch}: {message}")
        self.rank = rank
        self.stage = stage
        self.batch = batch
        self.message = message

    def __reduce__(self) -> tuple[type[RemoteRankError], tuple[int, str, int, str]]:
        """Pickled by its four values: exceptions are otherwise made anew from their text alone."""
        return type(self), (self.rank, self.stage, self.batch, self.message)


class StoreFullError(NestPipeError, RuntimeError):
    """A key could not be inserted: its table's quota is used up or memory ran out."""
