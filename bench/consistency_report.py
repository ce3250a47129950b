"""What the case `consistency` found, as a table and a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from nestpipe_kernels.trace.png import new_figure

__all__ = ["differences", "interval", "save_plot", "table"]

METRICS = ("HR@10", "HR@50", "NDCG@10", "NDCG@50")
PLAIN, SEQUENTIAL = "plain PyTorch", "sequential"
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 %, by degrees of freedom from 1."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval) by Student's t; infinite for one value."""
    if len(values) < 2:
        return mean(values), math.inf
    return mean(values), T_95[min(len(values) - 2, len(T_95) - 1)] * stdev(values) / math.sqrt(len(values))


def _grouped(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], dict[int, dict[str, Any]]]:
    """(model, impl, micro-batches) -> seed -> line, in the order of the lines."""
    found: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        found[line["model"], line["impl"], line["micro_batches"]][line["seed"]] = line
    return found


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table: means over seeds; whether losses and metrics are those of `sequential` with the same
    number of micro-batches, to the last digit, for every seed."""
    groups = _grouped(lines)
    found = [
        f"| model | run | N | {' | '.join(METRICS)} | last loss | as sequential |",
        "|" + "---|" * (len(METRICS) + 5),
    ]
    for (model, impl, count), by_seed in groups.items():
        values = [f"{mean(line[name] for line in by_seed.values()):.4f}" for name in METRICS]
        loss = f"{mean(line['losses'][-1] for line in by_seed.values()):.4f}"
        same = (
            ""
            if impl == SEQUENTIAL or impl.startswith(PLAIN)
            else _same(by_seed, groups.get((model, SEQUENTIAL, count), {}))
        )
        found.append(f"| {model} | {impl} | {count} | {' | '.join(values)} | {loss} | {same} |")
    return found


def differences(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table: every metric less plain PyTorch's, paired by seed: mean and half of the 95 % interval,
    in thousandths."""
    groups = _grouped(lines)
    found = [f"| model | run | N | {' | '.join(METRICS)} |", "|" + "---|" * (len(METRICS) + 3)]
    for (model, impl, count), by_seed in groups.items():
        plain = groups.get((model, PLAIN, 1), {})
        both = [(line, plain[seed]) for seed, line in by_seed.items() if seed in plain]
        if impl == PLAIN or not both:
            continue
        values = [_difference([(line[name] - other[name]) * 1e3 for line, other in both]) for name in METRICS]
        found.append(f"| {model} | {impl} | {count} | {' | '.join(values)} |")
    return found


def _same(by_seed: dict[int, dict[str, Any]], others: dict[int, dict[str, Any]]) -> str:
    pairs = [(line, others[seed]) for seed, line in by_seed.items() if seed in others]
    if not pairs:
        return ""
    return "yes" if all(a["losses"] == b["losses"] and all(a[m] == b[m] for m in METRICS) for a, b in pairs) else "no"


def _difference(values: Sequence[float]) -> str:
    middle, half = interval(values)
    return f"{middle:+.2f}" if math.isinf(half) else f"{middle:+.2f} ± {half:.2f}"


def save_plot(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """For each model: losses of one seed, how far they are from plain PyTorch's (largest of all seeds), and NDCG@10 of
    every seed; raises ImportError without matplotlib."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    figure = new_figure((16.0, 4.4 * len(models)))
    for axes, model in zip(figure.subplots(len(models), 3, squeeze=False), models):
        groups = {key[1:]: by_seed for key, by_seed in _grouped(lines).items() if key[0] == model}
        _draw_model(axes, model, groups)
    figure.tight_layout()
    figure.savefig(path)


def _draw_model(axes: Any, model: str, groups: dict[tuple[str, int], dict[int, dict[str, Any]]]) -> None:
    curves, apart, points = axes
    plain = groups.get((PLAIN, 1), {})
    seed = min(seed for by_seed in groups.values() for seed in by_seed)
    names = [impl if impl.startswith(PLAIN) else f"{impl}, N {count}" for impl, count in groups]
    for place, ((impl, _), by_seed) in enumerate(groups.items()):
        style = {"nested": "--", SEQUENTIAL: "-"}.get(impl, "-." if impl == "async" else ":")
        if seed in by_seed:
            curves.plot(_smooth(by_seed[seed]["losses"]), style, linewidth=1.3, label=names[place])
        both = [(line["losses"], plain[s]["losses"]) for s, line in by_seed.items() if s in plain]
        if impl != PLAIN and both:
            gaps = [max(abs(ours[k] - others[k]) for ours, others in both) for k in range(len(both[0][0]))]
            apart.plot([max(gap, 1e-8) for gap in gaps], style, linewidth=1.0, label=names[place])
        points.plot([line["NDCG@10"] for line in by_seed.values()], [place] * len(by_seed), "o", markersize=4)
    curves.set(title=f"{model}: loss, seed {seed}", xlabel="step", ylabel="mean of 8 steps")
    curves.legend(fontsize=7)
    apart.set(title=f"{model}: |loss - plain PyTorch's|, largest of the seeds", xlabel="step", yscale="log")
    points.set(title=f"{model}: NDCG@10 of every seed", xlabel="NDCG@10")
    points.set_yticks(range(len(groups)), names, fontsize=8)
    points.invert_yaxis()


def _smooth(values: Sequence[float]) -> list[float]:
    return [mean(values[max(k - 7, 0) : k + 1]) for k in range(len(values))]
