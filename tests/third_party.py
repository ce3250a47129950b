"""Recommenders that others wrote: imported without the network, and without what only their trainers need."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

STAND_INS = {
    "requests": ("get",),
    "sklearn": (),
    "sklearn.cluster": ("KMeans",),
    "sklearn.metrics": ("accuracy_score", "log_loss", "mean_squared_error", "roc_auc_score"),
    "sklearn.preprocessing": ("LabelEncoder",),
    "tqdm": ("tqdm",),
}
"""What the libraries import for metrics, progress bars and to look for newer versions; nothing of it is called."""


@contextmanager
def stand_ins():
    """Empty modules in place of those that are not installed (and of requests: no test asks the network)."""
    wanted = [name for name in STAND_INS if name == "requests" or importlib.util.find_spec(name.split(".")[0]) is None]
    before = {name: sys.modules.get(name) for name in wanted}
    for name in wanted:
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = []
        for attribute in STAND_INS[name]:
            setattr(module, attribute, None)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@functools.cache  # also because ranks are threads, and what stands in must not be taken for the real thing by another
def library(name: str) -> Any:
    """A module of a library; without it the test is skipped, or fails where CI=true."""
    try:
        with stand_ins():
            return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"{name} is required in CI: {error}", pytrace=False)
        pytest.skip(f"{name} is not installed (make peers)")
