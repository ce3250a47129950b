"""From what the ranks measured to the lines of the case `pipeline`: means over ranks, bounds, shares, checks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

__all__ = ["BASELINE", "make_lines", "table"]

BASELINE = ("sequential", 1)
"""Implementation and micro-batches that exposed times and shares are held against."""
PEER_TOLERANCE = 1e-3


def make_lines(facts: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each implementation, from every rank's report in rank order.

    Raises:
        ValueError: implementations that must agree do not, or a peer computes something else.
    """
    _check_equal(found)
    ours = [_mean_over_ranks([report["ours"][k] for report in found]) for k in range(len(found[0]["ours"]))]
    rate = facts["bits_per_second"]
    for one in ours:
        one["comm_ms"] = None if rate is None else one["bytes_sent"] * 8e3 / rate
        one["edge_ms"] = None if rate is None else one["edge_rows"] * facts["shape"]["dim"] * 4 * 8e3 / rate
    by_key = {(one["impl"], one["micro_batches"]): one for one in ours}
    base = by_key[BASELINE]
    best = min(one["step_ms"] for one in ours if one["impl"] == BASELINE[0])
    lines = []
    for one in ours:
        alone = by_key.get((BASELINE[0], one["micro_batches"]), one)
        lines.append(_line(facts, one, _bound(alone, one, facts), base, best))
    for k in range(len(found[0]["peers"])):
        peer = _mean_over_ranks([report["peers"][k] for report in found])
        lines.append(_peer_line(facts, peer, best))
    return lines


def _mean_over_ranks(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = reports[0]
    result: dict[str, Any] = {}
    for name, value in first.items():
        if name == "lanes":
            lanes = sorted({lane for report in reports for lane in report["lanes"]})
            result[name] = {lane: fmean(report["lanes"].get(lane, 0.0) for report in reports) for lane in lanes}
        elif isinstance(value, float):
            result[name] = fmean(report[name] for report in reports)
        else:
            result[name] = value
    return result


def _check_equal(found: Sequence[dict[str, Any]]) -> None:
    for rank, report in enumerate(found):
        first: dict[int, dict[str, Any]] = {}
        for one in report["ours"]:
            if not one["exact"]:
                continue
            other = first.setdefault(one["micro_batches"], one)
            different = [name for name, value in other["digests"].items() if one["digests"].get(name) != value]
            if different:
                raise ValueError(
                    f"bench pipeline: {one['impl']} differs from {other['impl']} with {one['micro_batches']} "
                    f"micro-batches on rank {rank}, first in the {different[0]} ({len(different)} of "
                    f"{len(other['digests'])} differ); nothing is reported"
                )
        for peer in report["peers"]:
            if not peer["difference"] <= PEER_TOLERANCE:
                raise ValueError(
                    f"bench pipeline: {peer['impl']} differs from ours by {peer['difference']:.3g} in losses or rows "
                    f"of rank {rank} (at most {PEER_TOLERANCE:g}); nothing is reported"
                )


def _bound(alone: dict[str, Any], one: dict[str, Any], facts: dict[str, Any]) -> tuple[float, str]:
    """The slowest lane's busy time and its name: lanes as they work in `sequential`, where each works alone; the link
    by its rate; on CPU also a rank's processor time divided by its threads."""
    lanes = dict(alone["lanes"])
    if one["comm_ms"] is not None:
        lanes["link"] = min(one["comm_ms"], alone["comm_ms"])
    if facts["dense"] == "cpu":
        lanes["cores"] = alone["cpu_ms"] / facts["threads"]
    name = max(lanes, key=lambda lane: float(lanes[lane]))
    return float(lanes[name]), name


def _line(
    facts: dict[str, Any], one: dict[str, Any], bound: tuple[float, str], base: dict[str, Any], best: float
) -> dict[str, Any]:
    emulated = facts["dense"] == "emulated"
    numbers = {
        "step_ms": one["step_ms"],
        "p20_ms": one["p20_ms"],
        "p80_ms": one["p80_ms"],
        "compute_ms": one["compute_ms"],
        "lookup_ms": one["lookup_ms"],
        "comm_ms": one["comm_ms"],
        "exposed_lookup_ms": one["exposed_lookup_ms"],
        "exposed_comm_ms": one["exposed_communication_ms"],
        "exposed_other_ms": one["exposed_other_ms"],
        "cpu_ms": one["cpu_ms"],
        "edge_ms": one["edge_ms"],
        "bound_ms": bound[0],
    }
    return {
        "case": "pipeline",
        "shape": facts["shape"],
        "impl": one["impl"],
        "micro_batches": one["micro_batches"],
        **{name: None if value is None else round(value, 3) for name, value in numbers.items()},
        "bound_by": bound[1],
        "rows_sent": round(one["rows_sent"], 1),
        "bytes_sent": round(one["bytes_sent"]) if facts["bits_per_second"] is not None else None,
        "speedup": round(best / one["step_ms"], 4),
        "fraction_of_bound": round(bound[0] / one["step_ms"], 4),
        "exposed_lookup_share": _share(one["exposed_lookup_ms"], base["exposed_lookup_ms"]),
        "exposed_comm_share": _share(one["exposed_communication_ms"], base["exposed_communication_ms"]),
        **{name: round(one[name], 1) for name in ("distinct_rows", "first_rows", "last_rows", "resent_rows")},
        "identical": True if one["exact"] else None,
        "lanes_ms": {name: round(value, 3) for name, value in one["lanes"].items()},
        "steps": one["steps"],
        "note": "emulated accelerator: timed waits that use no core; a result about scheduling" if emulated else "",
        **_common(facts),
    }


def _share(value: float, whole: float) -> float | None:
    return round(value / whole, 4) if whole else None


def _peer_line(facts: dict[str, Any], peer: dict[str, Any], best: float) -> dict[str, Any]:
    """A peer's line has the same fields; what only our timeline tells is null."""
    unknown = dict.fromkeys(
        ("compute_ms", "lookup_ms", "exposed_lookup_ms", "exposed_comm_ms", "exposed_other_ms", "bound_ms", "bound_by",
         "rows_sent", "fraction_of_bound", "exposed_lookup_share", "exposed_comm_share")
    )  # fmt: skip
    rate = facts["bits_per_second"]
    return {
        "case": "pipeline",
        "shape": facts["shape"],
        "impl": peer["impl"],
        "micro_batches": 1,
        **{name: round(peer[name], 3) for name in ("step_ms", "p20_ms", "p80_ms", "cpu_ms")},
        "comm_ms": None if rate is None else round(peer["bytes_sent"] * 8e3 / rate, 3),
        "bytes_sent": round(peer["bytes_sent"]) if rate is not None else None,
        "speedup": round(best / peer["step_ms"], 4),
        **unknown,
        "identical": None,
        "difference": peer["difference"],
        "steps": peer["steps"],
        "note": "",
        **_common(facts),
    }


def _common(facts: dict[str, Any]) -> dict[str, Any]:
    names = ("dense", "emulated_ms", "net", "ranks", "threads", "versions", "cpu")
    return {"dtype": "float32", **{name: facts[name] for name in names}}


_COLUMNS = (
    ("step", "step_ms"),
    ("compute", "compute_ms"),
    ("lookup", "lookup_ms"),
    ("link", "comm_ms"),
    ("exposed lookup", "exposed_lookup_ms"),
    ("exposed comm", "exposed_comm_ms"),
    ("bound", "bound_ms"),
    ("speedup", "speedup"),
    ("of bound", "fraction_of_bound"),
)


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The most important columns as text, milliseconds."""
    rows = [["", "N", *(title for title, _ in _COLUMNS)]]
    for line in lines:
        cells = ["-" if line[name] is None else f"{line[name]:.2f}" for _, name in _COLUMNS]
        rows.append([line["impl"], str(line["micro_batches"]), *cells])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    text = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows]
    notes = {line["note"] for line in lines if line["note"]}
    return [*text, *sorted(notes)]
