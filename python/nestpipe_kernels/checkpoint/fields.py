"""Canonical JSON, and readers of typed fields that name the field's path in every complaint."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from ..errors import CheckpointError

__all__ = ["MAX_DEPTH", "Field", "canonical_bytes", "digest_of", "parse_canonical"]

MAX_DEPTH = 64
"""Levels of nesting that a manifest may have."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def canonical_bytes(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, a newline at the end.

    Raises:
        ValueError, TypeError: no JSON value.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def digest_of(value: dict[str, Any]) -> str:
    """SHA-256 of the canonical spelling of an object without its field `sha256`."""
    return hashlib.sha256(canonical_bytes({k: v for k, v in value.items() if k != "sha256"})).hexdigest()


def parse_canonical(data: bytes, where: str) -> Any:
    """Parse JSON that must be spelled canonically, at most MAX_DEPTH levels deep.

    Raises:
        CheckpointError: it is not; names `where`.
    """
    try:
        value = json.loads(data)
        check_depth(value, where)
        same = canonical_bytes(value) == data
    except CheckpointError:
        raise
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"checkpoint: {where} is no valid JSON ({type(error).__name__}: {str(error)[:200]}): it is damaged"
        ) from None
    if not same:
        raise CheckpointError(
            f"checkpoint: {where} is not spelled as it was written (sorted keys, no repetitions, no spaces): "
            "it is damaged or was edited"
        )
    return value


def check_depth(value: Any, where: str) -> None:
    """Raises CheckpointError if containers are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for one in level if isinstance(one, (dict, list)) for child in _children(one)]
        if not level:
            return
    raise CheckpointError(f"checkpoint: {where} is nested deeper than {MAX_DEPTH} levels")


def _children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


class Field:
    """A JSON value with the path that leads to it; each method demands a type and a range.

    Raises CheckpointError throughout: `checkpoint: FILE: PATH must be ..., got ...`.
    """

    def __init__(self, value: Any, file: str, path: str = "") -> None:
        self.value = value
        self.file = file
        self.path = path

    def refuse(self, expected: str) -> NoReturn:
        """Raise the complaint that this field must be `expected`."""
        path = self.path or "the whole"
        raise CheckpointError(f"checkpoint: {self.file}: {path} must be {expected}, got {_short(self.value)}")

    def members(self, *names: str) -> dict[str, Field]:
        """The fields of an object that has exactly these."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        missing, unknown = set(names) - set(self.value), set(self.value) - set(names)
        if missing:
            self.refuse(f"an object with a field {min(missing)!r}")
        if unknown:
            self.refuse(f"an object without the field {min(unknown)[:100]!r}")
        return {name: self._at(f".{name}" if self.path else name, self.value[name]) for name in names}

    def entries(self) -> dict[str, Field]:
        """The fields of an object with any names."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return {name: self._at(f"[{name[:200]!r}]", value) for name, value in self.value.items()}

    def items(self, exactly: int | None = None) -> list[Field]:
        """The entries of a list."""
        if not isinstance(self.value, list) or (exactly is not None and len(self.value) != exactly):
            self.refuse("a list" if exactly is None else f"a list of {exactly}")
        return [self._at(f"[{i}]", value) for i, value in enumerate(self.value)]

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            self.refuse(f"an integer in [{low}, {high}]")
        return int(self.value)

    def number(self) -> float | int:
        """A finite number, as it was written."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not _is_finite(self.value):
            self.refuse("a finite number")
        number: float | int = self.value
        return number

    def text(self, limit: int = 4096) -> str:
        """A string of 1 to `limit` characters."""
        if not isinstance(self.value, str) or not 1 <= len(self.value) <= limit:
            self.refuse(f"a string of 1 to {limit} characters")
        return self.value

    def one_of(self, choices: Iterable[str]) -> str:
        """One of some strings."""
        choices = list(choices)
        if not isinstance(self.value, str) or self.value not in choices:
            self.refuse(f"one of {', '.join(choices)}")
        return self.value

    def matching(self, pattern: re.Pattern[str], meaning: str) -> str:
        """A string that matches as a whole."""
        if not isinstance(self.value, str) or pattern.fullmatch(self.value) is None:
            self.refuse(meaning)
        return self.value

    def sha256(self) -> str:
        """64 lower-case hexadecimal digits."""
        return self.matching(_SHA256, "64 lower-case hexadecimal digits")

    def json_object(self) -> dict[str, Any]:
        """Any object, as it is."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def json_object_or_none(self) -> dict[str, Any] | None:
        """Any object, or null."""
        return None if self.value is None else self.json_object()

    def _at(self, step: str, value: Any) -> Field:
        return Field(value, self.file, f"{self.path}{step}")


def _is_finite(value: float | int) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:200]
