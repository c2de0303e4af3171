"""The tables of `benchmarks.arrivals`, made of its records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.records import Record, of_kind, table

_FIGURES = ("first_token_p50_ms", "first_token_p99_ms", "token_p50_ms", "token_p99_ms")
_HEADERS = ("first ms p50", "p99", "token ms p50", "p99")


def mode_name(num_draft_tokens: int | None) -> str:
    """plain, or K = so many."""
    return "plain" if num_draft_tokens is None else f"K = {num_draft_tokens}"


def summary(records: Sequence[Record]) -> str:
    """The closed loops, the open loops, and what is void of them."""
    lines = []
    for part in (_closed_table(records), _open_table(records)):
        lines += [*part, ""] if part else []
    for run in (*of_kind(records, "closed_loop"), *of_kind(records, "open_loop")):
        load = f"{run['concurrency']} open" if run["kind"] == "closed_loop" else f"{run['rate']:.2f} requests/s"
        name = f"{load}, {mode_name(run['num_draft_tokens'])}, {run['traffic']}"
        if run["void"]:
            lines.append(f"VOID: {name}: {run['void']}")
        if run["fallbacks"]:
            lines.append(f"without a drafter: {name}: {run['fallbacks']}")
    return "\n".join(lines).rstrip()


def traffic_ratios(records: Sequence[Record]) -> dict[tuple[int, int | None], list[float]]:
    """tokens/s of mixed over those of uniform traffic, one of each round, by (concurrency, K); void runs give none."""
    speeds = {
        (run["concurrency"], run["num_draft_tokens"], run["round"], run["traffic"]): run["tokens_per_second"]
        for run in of_kind(records, "closed_loop")
        if not run["void"]
    }
    ratios: dict[tuple[int, int | None], list[float]] = {}
    for (concurrency, mode, number, traffic), speed in speeds.items():
        uniform = speeds.get((concurrency, mode, number, "uniform"))
        if traffic == "mixed" and uniform:
            ratios.setdefault((concurrency, mode), []).append(speed / uniform)
    return ratios


def _closed_table(records: Sequence[Record]) -> list[str]:
    """One row a load and kind of traffic: medians over the rounds."""
    groups: dict[tuple[int, int, str], list[Record]] = {}
    for run in of_kind(records, "closed_loop"):
        groups.setdefault((run["concurrency"], run["num_draft_tokens"] or 0, run["traffic"]), []).append(run)
    ratios = traffic_ratios(records)
    rows: list[Sequence[object]] = []
    for (concurrency, mode, traffic), runs in sorted(groups.items()):
        good = [run for run in runs if not run["void"]]
        name = (str(concurrency), mode_name(mode or None), traffic)
        if not good:
            rows.append((*name, "VOID", *[None] * 6))
            continue
        found = ratios.get((concurrency, mode or None)) if traffic == "mixed" else None
        spread = f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else None
        figures = (_median(good, figure) for figure in ("tokens_per_second", "acceptance_length", *_FIGURES))
        rows.append((*name, *figures, spread))
    if not rows:
        return []
    headers = ("open", "mode", "traffic", "tokens/s", "tokens/step", *_HEADERS, "x uniform")
    return ["closed loops: so many requests always open", table(headers, rows)]


def _open_table(records: Sequence[Record]) -> list[str]:
    runs = sorted(
        of_kind(records, "open_loop"), key=lambda run: (run["rate"], run["num_draft_tokens"] or 0, run["traffic"])
    )
    rows: list[Sequence[object]] = []
    for run in runs:
        counts = [run[f"num_{name}"] for name in ("offered", "finished", "refused", "failed", "unfinished")]
        name = (f"{run['rate']:.2f}", run["share"], mode_name(run["num_draft_tokens"]), run["traffic"])
        if run["void"]:
            rows.append((*name, *counts, "VOID", *[None] * 6))
            continue
        figures = ("tokens_per_second", "goodput_per_second", *_FIGURES, "send_lag_p99_ms")
        rows.append((*name, *counts, *(run[figure] for figure in figures)))
    if not rows:
        return []
    headers = (
        *("rate", "share", "mode", "traffic", "offered", "finished", "refused", "failed", "cut off"),
        *("tokens/s", "goodput/s", *_HEADERS, "lag ms p99"),
    )
    limits = "".join(
        f", good: first token within {record['first_token_ms']:g} ms, {record['token_ms']:g} ms a token"
        for record in of_kind(records, "limits")
    )
    return [f"open loops: requests a second that arrive at random{limits}", table(headers, rows)]


def _median(runs: Sequence[Record], name: str) -> float | None:
    known = [run[name] for run in runs if run[name] is not None]
    return statistics.median(known) if known else None
