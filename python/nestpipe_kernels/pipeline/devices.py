"""On which device a pipeline works, and what it cannot do there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..device import CPU, DeviceBackend, backend_for
from ..types import EmbeddingModule

__all__ = ["check_device_settings", "check_rows_places", "pipeline_backend"]


def pipeline_backend(device: str | None, dense: Sequence[tuple[str, nn.Parameter]]) -> DeviceBackend:
    """The device of a pipeline's dense model.

    Args:
        device: as in PipelineConfig; None: the parameters tell.
        dense: the dense parameters by name.

    Raises:
        ValueError: a parameter is elsewhere than the others, or than `device`; an unknown device.
        NotImplementedError, RuntimeError: a device that cannot be used here (`backend_for`).
    """
    if device is None:
        device = str(dense[0][1].device) if dense else "cpu"
    backend = backend_for(device)
    for name, parameter in dense:
        if parameter.device != backend.device:
            raise ValueError(
                f"NestedPipeline: parameter {name!r} is on {parameter.device}, but the pipeline works on "
                f"{backend.device}; move the model there with model.to({str(backend.device)!r}) before its optimizer "
                "is made, or set PipelineConfig(device=...)"
            )
    return backend


def check_rows_places(backend: DeviceBackend, modules: Mapping[str, EmbeddingModule]) -> None:
    """Raises ValueError where rows lie on another accelerator than the pipeline's, or on one while it has none."""
    for name, module in modules.items():
        for store in module.row_stores():
            if store.device.type != "cpu" and store.device != backend.device:
                raise ValueError(
                    f"NestedPipeline: rows of table {store.tables[0].name!r} of module {name!r} lie on {store.device}, "
                    f"but the pipeline works on {backend.device}; move the dense model with "
                    f"model.to({str(store.device)!r}), or give the table another tier"
                )


def check_device_settings(backend: DeviceBackend, modules: Mapping[str, EmbeddingModule], owner_pooling: bool) -> None:
    """Refuse what works on the CPU only.

    Raises:
        ValueError: sparse groups, pooling at owners.
    """
    if backend is CPU:
        return
    if owner_pooling:
        raise ValueError(
            f"NestedPipeline: owner_pooling works on the CPU only so far, not on {backend.device}; leave it out"
        )
    for name, module in modules.items():
        if module.sparse_groups.count > 1:
            raise ValueError(
                f"NestedPipeline: module {name!r} has {module.sparse_groups.count} sparse groups, which work on the "
                f"CPU only so far, not on {backend.device}; use sparse_groups=1"
            )
