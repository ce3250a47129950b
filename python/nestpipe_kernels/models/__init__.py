"""Recommenders to train and measure with, and a factory for the command line."""

from __future__ import annotations

from nestpipe_kernels.models.build import SEQUENCE_MODELS, build
from nestpipe_kernels.models.dlrm import DLRM
from nestpipe_kernels.models.fuxi import FuXi
from nestpipe_kernels.models.hstu import HSTU

__all__ = ["DLRM", "HSTU", "SEQUENCE_MODELS", "FuXi", "build"]
