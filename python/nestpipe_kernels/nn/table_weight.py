"""`weight` of a drop-in: reads like a tensor of all rows, is read when an operation uses it, and cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nestpipe_kernels.nn.read_rows import guarded, written

__all__ = ["TableWeight"]


class TableWeight:
    """All rows of a module's table, [num_embeddings, embedding_dim], float32.

    Operations of torch take it where they take a tensor; each of them reads the rows as they are then. With gradients
    enabled, what is computed from them trains all rows. Asking for the shape, dtype or device reads nothing.

    Raises:
        TypeError: an operation would write to it or to a view of it, which would change a copy; something that only a
            parameter can do (freezing, hooks on its gradient).
    """

    def __init__(self, module: Any, detached: bool = False) -> None:
        self._module = module
        self._detached = detached

    @property
    def module(self) -> Any:
        """The module whose table it is."""
        return self._module

    def tensor(self) -> Tensor:
        """The rows, a copy; part of the graph unless detached."""
        rows: Tensor = self._module.weight_tensor(self._detached)
        return rows

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        traced = torch.compiler.is_dynamo_compiling()  # which knows no names of functions
        name = "" if traced else getattr(function, "__name__", str(function))
        for one in written(name, args, given):
            if isinstance(one, TableWeight):
                raise one._refused(name)
        weights = [one for one in (*args, *given.values()) if isinstance(one, TableWeight)]
        if given.get("max_norm") is not None and weights:
            raise weights[0]._refused(f"{name}(max_norm={given['max_norm']})")
        read: dict[tuple[int, bool], Tensor] = {}
        arguments, given = _read(list(args), read), _read(given, read)
        if len(weights) == 1 and args and args[0] is weights[0]:  # its views refuse writes, too
            arguments[0] = guarded(arguments[0], weights[0]._refused)
        return function(*arguments, **given)

    def _refused(self, what: str) -> TypeError:
        return TypeError(
            f"{self._module.described}: {what} would write to a copy of the rows; write them with "
            "load_state_dict(), or fill them before nk.convert; to change a copy, clone() it first"
        )

    # --------------------------------------------------------------------------------- what needs no rows

    @property
    def shape(self) -> torch.Size:
        """[num_embeddings, embedding_dim]"""
        return torch.Size((self._module.num_embeddings, self._module.embedding_dim))

    def size(self, dim: int | None = None) -> Any:
        """As Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """2"""
        return 2

    ndim = property(dim)
    dtype = torch.float32

    def numel(self) -> int:
        """Elements of all rows."""
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        """Where lookups' outputs are."""
        device: torch.device = self._module.table_module.output_device
        return device

    @property
    def requires_grad(self) -> bool:
        """Whether the table is trained."""
        return not self._detached and bool(self._module.trainable)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TableWeight:
        """Nothing, where it is so already. Raises TypeError otherwise: says how a table is frozen."""
        if self._detached:
            raise self._refused("requires_grad_")
        self._module.check_trainable(requires_grad)
        return self

    grad = None

    def _no_hooks(self, what: str) -> TypeError:
        return TypeError(
            f"{self._module.described}: {what}: the rows' gradients go to their store and would not pass the hook; "
            "register it on what the module returns (out.register_hook), or on a tensor computed from weight"
        )

    def register_hook(self, hook: Any) -> Any:
        """Raises TypeError: there is no gradient that the hook could get."""
        raise self._no_hooks("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raises TypeError, as register_hook does."""
        raise self._no_hooks("register_post_accumulate_grad_hook")

    @property
    def data(self) -> TableWeight:
        """The same without a graph."""
        return TableWeight(self._module, detached=True)

    @data.setter
    def data(self, value: Any) -> None:
        raise self._refused("assignment to data")

    def detach(self) -> TableWeight:
        """The same without a graph."""
        return self.data

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"TableWeight({self._module.described}, {list(self.shape)})"

    # ---------------------------------------------------------------------------------- what reads the rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"'TableWeight' has no attribute {name!r}")
        if name.endswith("_"):
            raise self._refused(name)
        return getattr(guarded(self.tensor(), self._refused), name)

    def __getitem__(self, index: Any) -> Tensor:
        return guarded(self.tensor(), self._refused)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._refused("assignment")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(guarded(self.tensor(), self._refused).unbind())

    def __array__(self, *args: Any) -> Any:
        return self.tensor().detach().numpy().__array__(*args)


def _read(tree: Any, read: dict[tuple[int, bool], Tensor]) -> Any:
    """Arguments with tensors in place of weights; one tensor for each, however often it is there."""
    if isinstance(tree, TableWeight):
        key = id(tree.module), tree._detached  # not its own id: each is new, and compiled code would look for that one
        if key not in read:
            read[key] = tree.tensor()
        return read[key]
    if type(tree) in (list, tuple):
        return type(tree)(_read(item, read) for item in tree)
    if type(tree) is dict:
        return {key: _read(value, read) for key, value in tree.items()}
    return tree


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: TableWeight, *args: Any) -> Any:
        rows = self.tensor()
        return getattr(rows, name)(*_read(args, {(id(self.module), self._detached): rows}))

    apply.__name__ = name
    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (*_BINARY, *("r" + name for name in _BINARY), "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne")
for _name in _OPERATORS:
    setattr(TableWeight, f"__{_name}__", _operator(f"__{_name}__"))
