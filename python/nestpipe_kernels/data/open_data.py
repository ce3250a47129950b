"""From the command line's `--data` text to a data set."""

from __future__ import annotations

from nestpipe_kernels.data.criteo import CriteoDataset
from nestpipe_kernels.data.dataset import Dataset
from nestpipe_kernels.data.movielens import MovieLensDataset
from nestpipe_kernels.data.synthetic import SyntheticConfig, SyntheticDataset

__all__ = ["open_data"]

_KINDS = "synthetic, criteo:PATH, movielens:PATH"


def open_data(
    spec: str, *, synthetic: SyntheticConfig | None = None, max_rows: int | None = None, history_length: int = 50
) -> Dataset:
    """Open what `spec` names.

    Args:
        spec: "synthetic", "criteo:PATH" or "movielens:PATH".
        synthetic: settings of the generator; None for its defaults.
        max_rows: first rows of a Criteo file to read; None for all.
        history_length: most films of a MovieLens history.

    Raises:
        ValueError: unknown kind, a missing or surplus path, or a malformed file.
        FileNotFoundError, IsADirectoryError: no such file.
    """
    kind, separator, path = spec.partition(":")
    if kind == "kuairand":
        raise ValueError(f"data kuairand is not available yet: choose one of {_KINDS}")
    if kind not in ("synthetic", "criteo", "movielens"):
        raise ValueError(f"unknown data {spec!r}: choose one of {_KINDS}")
    if kind == "synthetic":
        if separator:
            raise ValueError(f"data synthetic takes no path, got {spec!r}")
        return SyntheticDataset(synthetic)
    if not path:
        raise ValueError(f"data {kind} needs a path: {kind}:PATH, got {spec!r}")
    return CriteoDataset(path, max_rows) if kind == "criteo" else MovieLensDataset(path, history_length)
