"""The tables of docs/performance.md, made of a directory of results of `benchmarks.run_all`.

    python -m benchmarks.report RESULTS                               # print them
    python -m benchmarks.report RESULTS --page docs/performance.md    # put them into the page, between its markers

The same results always give the same text. Results of different hosts or revisions are refused: a table is of one host
and one revision. What was not measured, failed or is void stands there as such.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.arrivals_tables import mode_name
from benchmarks.records import Record, of_kind, read_records

BEGIN = "<!-- tables of benchmarks.report, do not edit below -->"
END = "<!-- end of tables -->"

_PARTS = ("serve", "arrivals", "peers")
# What has to be the same in all parts.
_SAME = ("revision", "device", "num_gpus", "cpu", "python", "torch", "triton", "transformers", "grpcio")


class ReportError(Exception):
    """No page can be made of the results; the message says why."""


def report(directory: Path, *, revision: str | None = None) -> str:
    """The Markdown between the markers. `revision` names that of results from a host without git.

    Raises ReportError where nothing was measured, and where results are of different hosts or revisions.
    """
    parts = {part: read_records(directory / f"{part}.jsonl") for part in _PARTS}
    sections = [
        _head(parts, revision),
        _section("Waves of requests", parts["serve"], _serving),
        _section("Requests that arrive at random", parts["arrivals"], _arrivals),
        _section("Beside other engines", [*parts["peers"], *of_kind(parts["serve"], "serve")], _peers),
    ]
    return "\n\n".join(sections)


def replace_tables(page: str, tables: str) -> str:
    """The page with what stands between its markers replaced. Raises ReportError unless each marker is there once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ReportError(f"the page must hold {BEGIN!r} and behind it {END!r}, each once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


def _head(parts: dict[str, list[Record]], revision: str | None) -> str:
    found = {part: of_kind(records, "environment")[0] for part, records in parts.items() if records}
    if not found:
        raise ReportError(f"there is none of {', '.join(f'{part}.jsonl' for part in _PARTS)}")
    first = next(iter(found.values()))
    for part, one in found.items():
        for name in _SAME:
            if one.get(name) != first.get(name):
                raise ReportError(f"{part} is of another {name} than the rest: {one.get(name)}, not {first.get(name)}")
    if first.get("revision") and revision and not first["revision"].startswith(revision):
        raise ReportError(f"the results are of revision {first['revision']}, not {revision}")
    revision = first.get("revision") or revision
    if revision is None:
        raise ReportError("the results do not name their revision, as on a host without git: give it by --revision")
    dates = sorted(one["date"][:10] for one in found.values())
    date = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton", "transformers", "grpcio"))
    lines = [
        f"{date}, revision {revision}, {first['num_gpus']} x {first['device']}, {first['cpu'] or 'CPU unknown'}, "
        f"Python {first['python']}, {versions}."
    ]
    for part in ("serve", "arrivals"):
        for record in of_kind(parts[part], "placement"):
            lines.append(
                f"`{part}`: verifier on {record['verifier']}, drafter on {record['drafter']}, "
                f"{record['num_candidates']} candidates."
            )
    return "\n".join(lines)


def _section(title: str, records: Sequence[Record], body: Callable[[Sequence[Record]], str]) -> str:
    """A heading and what `body` makes of the records, or why there is nothing."""
    refusals = of_kind(records, "refused")
    text = f"REFUSED: {refusals[0]['reason']}" if refusals else body(records) or "Not measured."
    notes = [f"FAILED: {record['what']}: {record['reason']}" for record in of_kind(records, "failed")]
    notes += [f"Left out, the time was up: {record['what']}." for record in of_kind(records, "left_out")]
    notes += [f"Left out: {record['what']}, {record['reason']}." for record in of_kind(records, "absent")]
    return "\n\n".join([f"### {title}", text, *notes])


def _serving(records: Sequence[Record]) -> str:
    runs = {
        (run["temperature"], run["batch_size"], run["num_draft_tokens"] or 0): run for run in of_kind(records, "serve")
    }
    rows = []
    for temperature, batch_size, limit in sorted(runs, key=lambda key: (-key[0], key[1], key[2])):
        if not limit:
            continue
        plain, run = runs.get((temperature, batch_size, 0)), runs[temperature, batch_size, limit]
        plain_speed, speed = _speed(plain), _speed(run)
        rows.append(
            (
                f"{temperature:g}",
                batch_size,
                limit,
                plain_speed or "void",
                speed or "void",
                speed / plain_speed if speed and plain_speed else None,
                run["acceptance_length"] if speed else None,
                plain["time_to_first_token_ms"] if plain and plain_speed else None,
                run["time_to_first_token_ms"] if speed else None,
            )
        )
    headers = ("T", "requests", "K", "plain, tokens/s", "speculating, tokens/s", "ratio", "tokens a step")
    return _table((*headers, "first token, plain, ms", "speculating, ms"), rows)


def _arrivals(records: Sequence[Record]) -> str:
    latencies = ("first_token_p50_ms", "first_token_p99_ms", "token_p50_ms", "token_p99_ms")
    headers = ("first token p50, ms", "p99", "a token p50, ms", "p99")
    opened = [
        (
            run["rate"],
            mode_name(run["num_draft_tokens"]),
            run["traffic"],
            f"{run['num_finished']} of {run['num_offered']}",
            *((run["goodput_per_second"], run["tokens_per_second"]) if not run["void"] else ("void", "void")),
            *(None if run["void"] else run[name] for name in latencies),
        )
        for run in sorted(of_kind(records, "open_loop"), key=_load_order)
    ]
    closed = [
        (
            run["concurrency"],
            mode_name(run["num_draft_tokens"]),
            run["traffic"],
            "void" if run["void"] else run["tokens_per_second"],
            None if run["void"] else run["acceptance_length"],
            *(None if run["void"] else run[name] for name in latencies),
        )
        for run in sorted(of_kind(records, "closed_loop"), key=_load_order)
    ]
    limits = "".join(
        f"Good: the first token within {record['first_token_ms']:g} ms, {record['token_ms']:g} ms for each further one."
        for record in of_kind(records, "limits")
    )
    tables = [
        _table(("requests/s", "mode", "traffic", "finished", "good requests/s", "tokens/s", *headers), opened),
        _table(("always open", "mode", "traffic", "tokens/s", "tokens a step", *headers), closed),
    ]
    return "\n\n".join(text for text in (limits, *tables) if text)


def _peers(records: Sequence[Record]) -> str:
    """Tokens a second at temperature 1 by engine, one column a batch size."""
    speeds: dict[tuple[str, str], dict[int, float | None]] = {}
    for run in of_kind(records, "serve"):
        if run["temperature"] == 1:
            row = speeds.setdefault(("Outrider", mode_name(run["num_draft_tokens"])), {})
            row[run["batch_size"]] = _speed(run)
    for run in of_kind(records, "vllm"):
        if run["temperature"] == 1:
            num_gpus = run["tensor_parallel"]
            name = f"vLLM {run['version']}, {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
            speeds.setdefault((name, mode_name(run["num_draft_tokens"])), {})[run["batch_size"]] = _speed(run)
    for run in of_kind(records, "transformers"):
        if run["temperature"] == 1:
            mode = "assisted" if run["is_assisted"] else "plain"
            speeds.setdefault(("transformers", mode), {})[1] = _speed(run)
    if not any(engine != "Outrider" for engine, _ in speeds):
        return ""
    sizes = sorted({size for row in speeds.values() for size in row})
    rows = [
        (engine, mode, *(("void" if row[size] is None else row[size]) if size in row else None for size in sizes))
        for (engine, mode), row in sorted(speeds.items(), key=lambda item: (item[0][0], item[0][1] != "plain"))
    ]
    table = _table(("engine", "mode", *(f"{size} at once, tokens/s" for size in sizes)), rows)
    return f"Temperature 1.\n\n{table}"


def _speed(run: Record | None) -> float | None:
    return None if run is None or run["void"] else float(run["tokens_per_second"])


def _load_order(run: Record) -> tuple[float, int, str, int]:
    load = run["rate"] if run["kind"] == "open_loop" else run["concurrency"]
    return load, run["num_draft_tokens"] or 0, run["traffic"], run.get("round", 0)


def _table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, nothing where there are no rows; None is an empty cell."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(headers)} |", "|---" * len(headers) + "|", *lines]) if lines else ""


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return "" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables or put them into a page; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="directory that benchmarks.run_all wrote")
    parser.add_argument("--page", type=Path, help="the page to change (default: print the tables)")
    parser.add_argument("--revision", help="of the results, where the host had no git")
    options = parser.parse_args(arguments)
    try:
        tables = report(options.results, revision=options.revision)
        if options.page is None:
            print(tables)
        else:
            options.page.write_text(replace_tables(options.page.read_text(), tables))
    except ReportError as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
