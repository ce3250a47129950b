"""The final table of `nestpipe train`, and why a schedule is not faster where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nestpipe_kernels.config import default_threads

if TYPE_CHECKING:
    from nestpipe_kernels.cli.options import TrainOptions
    from nestpipe_kernels.cli.training import TrainingRun

__all__ = ["explain", "means", "table"]

COLUMNS = (
    ("step ms", "step_ms"),
    ("compute", "compute_ms"),
    ("exposed lookup", "exposed_lookup_ms"),
    ("exposed communication", "exposed_communication_ms"),
    ("other", "other_ms"),
)


def means(per_rank: list[TrainingRun]) -> dict[str, float]:
    """Mean over ranks of each rank's median over steps, milliseconds."""
    names = [name for name in per_rank[0].summary if name.endswith("_ms") and name != "busy_ms"]
    result = {name: sum(run.summary[name] for run in per_rank) / len(per_rank) for name in names}
    known = result["compute_ms"] + result["exposed_lookup_ms"] + result["exposed_communication_ms"]
    result["other_ms"] = max(result["step_ms"] - known, 0.0)
    return result


def table(options: TrainOptions, runs: list[list[TrainingRun]]) -> list[str]:
    """Lines of the table; with several runs the last column compares with the first row."""
    compared = len(runs) > 1
    rows = [["schedule", *(title for title, _ in COLUMNS), *(["speedup"] * compared)]]
    first = means(runs[0])
    for per_rank in runs:
        numbers = means(per_rank)
        speedup = first["step_ms"] / numbers["step_ms"] if numbers["step_ms"] else 0.0
        cells = [f"{numbers[name]:.2f}" for _, name in COLUMNS]
        rows.append([_shown(options, per_rank[0].schedule), *cells, *([f"{speedup:.2f}x"] * compared)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append(" | ".join(cells))
    lines.insert(1, "-+-".join("-" * width for width in widths))
    steps = min(runs[0][0].summary["steps"], runs[0][0].steps)
    lines.append(
        f"median ms of the last {steps} steps, mean over ranks; exposed: the compute thread waited; other: drawing "
        "batches, joining outputs, waits for sums and updates"
    )
    if options.emulate_accelerator is not None:
        lines.append(f"emulated accelerator: {options.emulate_accelerator:g} ms of every step's compute is a wait")
    return lines


def _shown(options: TrainOptions, schedule: str) -> str:
    return "nested+early" if options.early_send and schedule == "nested" else schedule


def explain(options: TrainOptions, runs: list[list[TrainingRun]]) -> list[str]:
    """Why the chosen schedule is not faster than `sequential`; nothing where it is, or where there is only one."""
    if len(runs) < 2:
        return []
    base, chosen = means(runs[0]), means(runs[1])
    if chosen["step_ms"] < base["step_ms"]:
        return []
    world_size = len(runs[0])
    exposed = base["exposed_lookup_ms"] + base["exposed_communication_ms"]
    share = 100 * exposed / base["step_ms"] if base["step_ms"] else 0.0
    lanes = sum(sum(v for k, v in run.summary["busy_ms"].items() if k != "compute") for run in runs[1]) / world_size
    cores = default_threads() * world_size
    return [
        f"{options.schedule} is not faster here: {share:.0f} % of sequential's step waits for lookups and exchanges, "
        f"but they are {lanes:.1f} ms of CPU work a step themselves, and while all {cores} cores compute no idle "
        "one is left to do it meanwhile. An accelerator, or a real network, leaves one free (docs/timeline.md)"
    ]
