"""From the command line's `--data` text to a data set."""

from __future__ import annotations

from nestpipe_kernels.data.criteo import CriteoDataset
from nestpipe_kernels.data.dataset import Dataset
from nestpipe_kernels.data.kuairand import read_clicks
from nestpipe_kernels.data.movielens import MovieLensDataset, read_ratings
from nestpipe_kernels.data.sequences import Interactions, SequenceDataset
from nestpipe_kernels.data.synthetic import SyntheticConfig, SyntheticDataset

__all__ = ["open_data"]

_KINDS = "synthetic, criteo:PATH, movielens:PATH, kuairand:PATH"
_SEQUENCES = "movielens:PATH or kuairand:PATH"


def open_data(
    spec: str,
    *,
    synthetic: SyntheticConfig | None = None,
    max_rows: int | None = None,
    history_length: int = 50,
    sequences: bool = False,
) -> Dataset:
    """Open what `spec` names.

    Args:
        spec: "synthetic", "criteo:PATH", "movielens:PATH" or "kuairand:PATH".
        synthetic: settings of the generator; None for its defaults.
        max_rows: first rows of a Criteo file to read; None for all.
        history_length: most films of a MovieLens history.
        sequences: a SequenceDataset, for models of sequences.

    Raises:
        ValueError: unknown kind, one that does not give what was asked for, a missing or surplus path, or a malformed
            file.
        FileNotFoundError, IsADirectoryError: no such file.
    """
    kind, separator, path = spec.partition(":")
    if kind not in ("synthetic", "criteo", "movielens", "kuairand"):
        raise ValueError(f"unknown data {spec!r}: choose one of {_KINDS}")
    if sequences and kind not in ("movielens", "kuairand"):
        raise ValueError(f"data {kind} has no sequences: choose {_SEQUENCES}, or model dlrm")
    if kind == "kuairand" and not sequences:
        raise ValueError("data kuairand has sequences alone: choose model hstu or fuxi, or other data")
    if kind == "synthetic":
        if separator:
            raise ValueError(f"data synthetic takes no path, got {spec!r}")
        return SyntheticDataset(synthetic)
    if not path:
        raise ValueError(f"data {kind} needs a path: {kind}:PATH, got {spec!r}")
    if kind == "kuairand":
        return SequenceDataset(kind, read_clicks(path))
    if sequences:
        ratings = read_ratings(path)
        return SequenceDataset(kind, Interactions(ratings.users, ratings.items, ratings.timestamps))
    return CriteoDataset(path, max_rows) if kind == "criteo" else MovieLensDataset(path, history_length)
