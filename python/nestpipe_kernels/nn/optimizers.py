"""Which update rule each table of a collection gets, and what it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nestpipe_kernels import init
from nestpipe_kernels.nn.configs import TableConfig
from nestpipe_kernels.nn.policies import first_policy
from nestpipe_kernels.optim import SGD
from nestpipe_kernels.types import DataType, SparseOptimizer

__all__ = ["initial_values", "resolve_optimizers"]


def resolve_optimizers(
    tables: Sequence[TableConfig], default: SparseOptimizer | None, owner: str
) -> list[SparseOptimizer] | None:
    """The optimizer of every table; None where no table has one: autograd trains them as parameters.

    A frozen table needs none.

    Raises:
        TypeError: `default` or a table's optimizer is no `nk.optim` object.
        ValueError: some tables have an optimizer and others do not, or a setting needs one.
    """
    chosen = [default if config.optimizer is None else config.optimizer for config in tables]
    for config, optimizer in zip(tables, chosen, strict=True):
        if optimizer is not None and not (hasattr(optimizer, "state_floats") and hasattr(optimizer, "hyper")):
            raise TypeError(
                f"{owner}: table {config.name!r}: optimizer must be an nk.optim object such as nk.optim.Adam(lr=1e-3), "
                f"got {type(optimizer).__name__}; optimizers of torch.optim need parameters: leave optimizer out"
            )
    if all(optimizer is None for optimizer in chosen):
        for config in tables:
            _check_parameter_table(config, owner)
        return None
    without = [
        config.name for config, optimizer in zip(tables, chosen, strict=True) if optimizer is None and config.trainable
    ]
    if without:
        having = [config.name for config, optimizer in zip(tables, chosen, strict=True) if optimizer is not None]
        raise ValueError(
            f"{owner}: tables {having} have an optimizer, but {without} have none; "
            "give the collection an optimizer, or put the others in a collection of their own"
        )
    return [SGD(lr=0.0) if optimizer is None else optimizer for optimizer in chosen]


def initial_values(config: TableConfig) -> Any:
    """The `nk.init` object of a table."""
    if config.init is not None:
        return config.init
    return init.Uniform(config.get_weight_init_min(), config.get_weight_init_max())


def _check_parameter_table(config: TableConfig, owner: str) -> None:
    where = f"{owner}: table {config.name!r}"
    if config.is_open:
        raise ValueError(
            f"{where}: an open vocabulary (num_embeddings=UNBOUNDED) needs an optimizer; "
            "pass optimizer=, for example nk.optim.RowWiseAdagrad(lr=0.05)"
        )
    setting = first_policy(config)
    if setting is not None:
        raise ValueError(f"{where}: {setting} needs an optimizer; pass optimizer=, or leave {setting} out")
    if config.data_type is not DataType.FP32:
        raise ValueError(
            f"{where}: data_type {config.data_type.value} needs an optimizer; pass optimizer=, or leave data_type out"
        )
    if config.max_grad_norm is not None:
        raise ValueError(
            f"{where}: max_grad_norm needs an optimizer; pass optimizer=, or clip with torch.nn.utils.clip_grad_norm_"
        )
    if config.lr_scale != 1.0:
        raise ValueError(
            f"{where}: lr_scale needs an optimizer; pass optimizer=, or scale the learning rate of your own optimizer"
        )
    if "." in config.name:
        raise ValueError(f"{where}: a table without an optimizer is a module, whose name must not contain a dot")
