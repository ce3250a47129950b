"""The bindings: constructors run under the interpreter's lock."""

from __future__ import annotations

from source_tree import CSRC


def _call(text: str, begin: int) -> str:
    """The call whose name begins there, to its closing parenthesis."""
    depth = 0
    for at in range(text.index("(", begin), len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin : at + 1]
    raise AssertionError("unbalanced parentheses")


def test_no_constructor_is_registered_without_the_lock() -> None:
    """pybind11 enters a new object into a list of its own after the factory returns: a guard on the call would release
    the lock for that, too, and threads that make and free objects at the same time would abort the process."""
    found = 0
    for path in (CSRC / "bindings").glob("*.cpp"):
        text = path.read_text(encoding="utf-8")
        begin = 0
        while (begin := text.find("def(py::init", begin)) >= 0:
            call = _call(text, begin)
            assert "NoGil" not in call and "call_guard" not in call, f"{path.name}: {call[:80]}"
            found += 1
            begin += 1
    assert found >= 3
