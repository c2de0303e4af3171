"""The plot of `benchmarks.serve`: tokens a second by batch size."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import goals
from benchmarks.load import mode_name
from benchmarks.records import Record, has_goals, of_kind, progress


def save_plot(records: Sequence[Record], path: Path) -> bool:
    """Draw to `path`; False, with a note, where matplotlib is not installed."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        progress("no plot: matplotlib is not installed")
        return False
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    runs = [run for run in of_kind(records, "serve") if not run["void"]]
    temperatures = sorted({run["temperature"] for run in runs})
    if not temperatures:
        progress("no plot: there is nothing to draw")
        return False
    figure, axes = pyplot.subplots(1, len(temperatures), figsize=(5.5 * len(temperatures), 4), squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        points: dict[str, list[tuple[int, float]]] = {}
        for run in runs:
            if run["temperature"] == temperature:
                mode = mode_name(run["num_draft_tokens"], temperature, run.get("verification", "rejection"))
                points.setdefault(mode, []).append((run["batch_size"], run["tokens_per_second"]))
        for mode, found in sorted(points.items()):
            axis.plot(*zip(*sorted(found), strict=True), marker="o", label=f"Outrider, {mode}")
        if temperature == 1 and has_goals(records):
            peers = {
                "vLLM 0.25.1, plain, 1 GPU": goals.VLLM_PLAIN_TOKENS_PER_SECOND,
                "vLLM 0.25.1, K = 4, 1 GPU": goals.VLLM_SPECULATIVE_TOKENS_PER_SECOND,
            }
            for label, speeds in peers.items():
                axis.plot(list(speeds), list(speeds.values()), linestyle="--", marker=".", label=label)
        axis.set(
            title=f"temperature {temperature:g}",
            xlabel="requests at once",
            ylabel="output tokens/s",
            xscale="log",
            yscale="log",
        )
        ticks = sorted({run["batch_size"] for run in runs})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    progress(f"plot: {path}")
    return True
