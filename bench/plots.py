"""Pictures of kernel cases: one PNG for each case, a bar for each implementation, the floor marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nestpipe_kernels.trace.png import new_figure

__all__ = ["draw"]

OURS_COLOUR, PEER_COLOUR, FLOOR_COLOUR = "#2f6f9f", "#b9bfc7", "#c4372b"
WIDTH_INCHES, BAR_INCHES, GROUP_INCHES, EDGE_INCHES = 11.0, 0.28, 0.62, 0.9


def draw(directory: Path, lines: Sequence[dict[str, Any]]) -> list[Path]:
    """Draw CASE.png for each case of the lines and say which files were written.

    Raises:
        ImportError: matplotlib is missing; its message says how to get it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return [_draw_case(directory, case, [x for x in lines if x["case"] == case]) for case in _once(lines, "case")]


def _draw_case(directory: Path, case: str, lines: list[dict[str, Any]]) -> Path:
    """Each shape has a plot with a scale of its own: shapes differ by orders of magnitude."""
    groups = [
        [line for line in lines if (line["shape"], line["threads"]) == key]
        for key in _distinct((line["shape"], line["threads"]) for line in lines)
    ]
    inches = [GROUP_INCHES + BAR_INCHES * len(group) for group in groups]
    figure = new_figure((WIDTH_INCHES, EDGE_INCHES + sum(inches)))
    axes = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": inches})[:, 0]
    for axis, group in zip(axes, groups):
        _draw_group(axis, group)
    axes[-1].set_xlabel("milliseconds (median; thin line: 20 % to 80 %; red: the floor); shorter is better")
    figure.suptitle(f"{case} on {lines[0]['cpu']}", x=0.01, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.995))
    path = directory / f"{case}.png"
    figure.savefig(path)
    return path


def _draw_group(axis: Any, group: list[dict[str, Any]]) -> None:
    for place, line in enumerate(group):
        median = line["median_ms"]
        axis.barh(place, median, height=0.7, color=OURS_COLOUR if place == 0 else PEER_COLOUR)
        axis.plot([line["p20_ms"], line["p80_ms"]], [place, place], color="#333333", linewidth=1.2)
        ratio = f"  {median:.3g} ms" + (f", {median / group[0]['median_ms']:.2f}x ours" if place else "")
        axis.text(max(median, line["p80_ms"]), place, ratio, va="center", fontsize=8)
    floor = group[0]["median_ms"] * group[0]["fraction_of_floor"]
    axis.axvline(floor, color=FLOOR_COLOUR, linewidth=1.4)
    axis.set_yticks(range(len(group)), [line["impl"] for line in group], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(1.25 * max(line["p80_ms"] for line in group), 1.02 * floor))
    axis.tick_params(axis="x", labelsize=8)
    shape = ", ".join(f"{name} {value}" for name, value in group[0]["shape"].items())
    threads = group[0]["threads"]
    axis.set_title(f"{shape}; {threads} thread{'s' if threads > 1 else ''}", loc="left", fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _once(lines: Iterable[dict[str, Any]], name: str) -> list[Any]:
    return _distinct(line[name] for line in lines)


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
