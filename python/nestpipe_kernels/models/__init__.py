"""Recommenders to train and measure with, and a factory for the command line."""

from __future__ import annotations

from nestpipe_kernels.models.build import build
from nestpipe_kernels.models.dlrm import DLRM

__all__ = ["DLRM", "build"]
