"""Arguments of nk.convert that name modules: `settings` and `skip`, by any name that a module has in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["by_first_name", "checked_settings", "checked_skip", "of_tied"]

_OF_MODULE = ("num_embeddings", "embedding_dim", "mode", "include_last_offset", "_weight", "_freeze", "_fill")
_OF_MODULE_TOO = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse", "device", "dtype", "feature_names")
_OF_CONVERT = ("seed", "process_group", "sparse_groups")


def checked_settings(settings: Any) -> dict[str, dict[str, Any]]:
    """`settings` as dicts. Raises TypeError for what is none; ValueError for keywords that are not the table's."""
    if not isinstance(settings, (Mapping, type(None))):
        raise TypeError(
            "convert: settings must be a dict of a module's name -> dict of keywords of its table, got "
            f"{type(settings).__name__}; write settings={{'NAME': {{'lr_scale': 0.5}}}}"
        )
    found: dict[str, dict[str, Any]] = {}
    for name, given in (settings or {}).items():
        if not isinstance(name, str) or not isinstance(given, Mapping):
            raise TypeError(
                f"convert: settings of {name!r} must be a dict of keywords, under a module's name, got "
                f"{type(given).__name__}; write settings={{{str(name)!r}: {{'lr_scale': 0.5}}}}"
            )
        for key in given:
            if key in (*_OF_MODULE, *_OF_MODULE_TOO):
                raise ValueError(
                    f"convert: settings of {name!r} give {key!r}, which is taken from the module; change it there "
                    "before nk.convert"
                )
            if key in _OF_CONVERT:
                raise ValueError(
                    f"convert: settings of {name!r} give {key!r}, which is one for all tables; pass it to nk.convert"
                )
        if not isinstance(given.get("trainable", True), bool):
            raise TypeError(f"convert: settings of {name!r}: trainable must be a bool, got {given['trainable']!r}")
        found[name] = dict(given)
    return found


def checked_skip(skip: Any) -> set[str]:
    """`skip` as a set. Raises TypeError for what is no collection of names."""
    if isinstance(skip, str):
        raise TypeError(f"convert: skip must be a list of names, got the string {skip!r}; write skip=[{skip!r}]")
    if not isinstance(skip, Iterable):
        raise TypeError(f"convert: skip must be a list of names, got {type(skip).__name__}")
    names = list(skip)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"convert: skip must be a list of names, got one of type {type(name).__name__}")
    return set(names)


def by_first_name(what: str, names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Of each of `names` the first name of its module.

    Args:
        known: any name of a module that may be named -> its first name.

    Raises:
        ValueError: no such module, or two names of one; says what may be written.
    """
    first: dict[str, str] = {}
    for name in sorted(names):
        if name not in known:
            inside = sorted({one for one in known.values() if one.startswith(f"{name}.")})
            raise ValueError(
                f"convert: {what} names {name!r}, "
                + (f"which only contains such modules; name them: {inside}" if inside else "which is not converted; ")
                + ("" if inside else f"modules to convert are {list(dict.fromkeys(known.values()))}")
            )
        twin = next((other for other, one in first.items() if one == known[name]), None)
        if twin is not None and what == "settings":
            raise ValueError(f"convert: settings name {twin!r} and {name!r}, which are one module; keep one of them")
        first[name] = known[name]
    return first


def of_tied(groups: Sequence[Sequence[str]], settings: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings of each module, where those of one count for all that share its weight.

    Raises:
        ValueError: two modules that share a weight have different ones.
    """
    found = dict(settings)
    for names in groups:
        given = [name for name in names if name in settings]
        for name in given[1:]:
            if not _alike(settings[name], settings[given[0]]):
                raise ValueError(
                    f"convert: settings of {given[0]!r} and {name!r} differ, but they share a weight and so a table; "
                    "give them for one of the two"
                )
        if given:
            found |= dict.fromkeys(names, settings[given[0]])
    return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two modules' settings are equal; tensors are by being the same."""
    if one.keys() != other.keys():
        return False
    return all(
        value is other[key]
        or (not isinstance(value, Tensor) and type(value) is type(other[key]) and value == other[key])
        for key, value in one.items()
    )
