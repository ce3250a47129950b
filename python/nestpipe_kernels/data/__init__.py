"""Readers of public data sets, a synthetic generator, and batches of them for one rank."""

from __future__ import annotations

from nestpipe_kernels.data.accumulate import Accumulated, accumulate
from nestpipe_kernels.data.batch import Batch
from nestpipe_kernels.data.criteo import CriteoDataset, read_criteo
from nestpipe_kernels.data.dataset import Dataset, TableSchema
from nestpipe_kernels.data.kuairand import read_clicks
from nestpipe_kernels.data.loader import BatchLoader, batches
from nestpipe_kernels.data.movielens import MovieLensDataset, read_ratings
from nestpipe_kernels.data.open_data import open_data
from nestpipe_kernels.data.sequences import Interactions, SequenceBatch, SequenceDataset
from nestpipe_kernels.data.synthetic import SyntheticConfig, SyntheticDataset

__all__ = [
    "Accumulated",
    "Batch",
    "BatchLoader",
    "CriteoDataset",
    "Dataset",
    "Interactions",
    "MovieLensDataset",
    "SequenceBatch",
    "SequenceDataset",
    "SyntheticConfig",
    "SyntheticDataset",
    "TableSchema",
    "accumulate",
    "batches",
    "open_data",
    "read_clicks",
    "read_criteo",
    "read_ratings",
]
