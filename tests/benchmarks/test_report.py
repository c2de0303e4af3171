"""report.py makes the same page of the same results, of one host and revision, and hides nothing that is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkouts import ROOT
from benchmarks.report import BEGIN, END, ReportError, main, replace_tables, report

_ENVIRONMENT = {
    "kind": "environment",
    "date": "2026-01-02T03:04:05+00:00",
    "python": "3.12.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "grpcio": "1.85.1",
    "device": "NVIDIA H200",
    "cpu": "Some CPU",
    "num_gpus": 2,
    "revision": "abc123",
}
_PLACEMENT = {"kind": "placement", "verifier": "cuda:0", "drafter": "cuda:1", "num_candidates": 128}
_LATENCIES = {f"{name}_{cut}_ms": 12.0 for name in ("first_token", "token") for cut in ("p50", "p99")}


def _serve(batch_size: int, limit: int | None, speed: float, **fields: Any) -> dict[str, Any]:
    common = {"kind": "serve", "temperature": 1.0, "acceptance_length": 3.2 if limit else 1.0, "void": None}
    figures = {"tokens_per_second": speed, "time_to_first_token_ms": 21.0}
    return {**common, "batch_size": batch_size, "num_draft_tokens": limit, **figures, **fields}


def _open(limit: int | None, **fields: Any) -> dict[str, Any]:
    counts = {"num_offered": 240, "num_finished": 231, "goodput_per_second": 9.5, "tokens_per_second": 1234.5}
    common = {"kind": "open_loop", "rate": 12.0, "traffic": "mixed", "num_draft_tokens": limit, "void": None}
    return {**common, **counts, **_LATENCIES, **fields}


def _write(directory: Path, **parts: list[dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    for part, records in parts.items():
        lines = [json.dumps(record) for record in ({**_ENVIRONMENT, "part": part}, *records)]
        (directory / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def _results(directory: Path) -> Path:
    serve = [_serve(64, None, 10_000.0), _serve(8, 4, 2_400.0), _serve(8, None, 1_600.0), _serve(64, 4, 12_000.0)]
    vllm = {"kind": "vllm", "version": "0.25.1", "tensor_parallel": 1, "temperature": 1.0, "batch_size": 8}
    peers = [
        {"kind": "transformers", "temperature": 1.0, "is_assisted": False, "tokens_per_second": 41.0, "void": None},
        {**vllm, "num_draft_tokens": None, "tokens_per_second": 1_554.0, "void": None},
        {**vllm, "num_draft_tokens": 4, "tokens_per_second": 2_252.0, "void": "planted"},
    ]
    limits = {"kind": "limits", "first_token_ms": 1000.0, "token_ms": 25.0}
    return _write(
        directory, serve=[_PLACEMENT, *serve], arrivals=[limits, _open(4), _open(None, void="planted")], peers=peers
    )


def test_the_same_results_give_the_same_tables(tmp_path: Path) -> None:
    text = report(_results(tmp_path / "one"))
    assert text == report(_results(tmp_path / "one"))
    serve = tmp_path / "one" / "serve.jsonl"
    first, *rest = serve.read_text().splitlines()
    serve.write_text("\n".join([first, *reversed(rest)]) + "\n")
    assert text == report(tmp_path / "one"), "the order in which things were measured shows"
    assert "2026-01-02, revision abc123, 2 x NVIDIA H200, Some CPU, Python 3.12.1, torch 2.11.0" in text
    assert "`serve`: verifier on cuda:0, drafter on cuda:1, 128 candidates." in text
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("| 1 |")]
    assert rows == [
        "| 1 | 8 | 4 | 1,600 | 2,400 | 1.50 | 3.20 | 21.0 | 21.0 |",
        "| 1 | 64 | 4 | 10,000 | 12,000 | 1.20 | 3.20 | 21.0 | 21.0 |",
    ]
    assert "| 12.0 | K = 4 | mixed | 231 of 240 | 9.50 | 1,234 | 12.0 | 12.0 | 12.0 | 12.0 |" in lines
    assert "| Outrider | K = 4 |  | 2,400 | 12,000 |" in lines
    assert "| transformers | plain | 41.0 |  |  |" in lines
    assert "| vLLM 0.25.1, 1 GPU | plain |  | 1,554 |  |" in lines


def test_what_is_void_or_missing_shows_and_no_figure_of_it(tmp_path: Path) -> None:
    lines = report(_results(tmp_path / "one")).splitlines()
    assert "| vLLM 0.25.1, 1 GPU | K = 4 |  | void |  |" in lines
    assert "| 12.0 | plain | mixed | 231 of 240 | void | void |  |  |  |  |" in lines
    records = [_serve(8, 4, 9.0), _serve(8, None, 9.0, void="planted"), {"kind": "left_out", "what": "batch 64"}]
    failed = [{"kind": "failed", "what": "arrivals", "reason": "planted"}]
    absent = [{"kind": "absent", "what": "vLLM", "reason": "it is not installed here"}]
    text = report(_write(tmp_path / "two", serve=records, arrivals=failed, peers=absent))
    assert "| 1 | 8 | 4 | void | 9.00 |  | 3.20 |  | 21.0 |" in text
    assert "Left out, the time was up: batch 64." in text
    assert "FAILED: arrivals: planted" in text
    assert "Left out: vLLM, it is not installed here." in text
    assert text.count("Not measured.") == 2
    refused = report(_write(tmp_path / "three", serve=[{"kind": "refused", "reason": "planted"}, _serve(8, 4, 9.0)]))
    assert "REFUSED: planted" in refused
    assert "9.00" not in refused.partition("### Requests that arrive")[0]


def test_results_of_different_hosts_are_refused(tmp_path: Path) -> None:
    directory = _results(tmp_path / "one")
    peers = directory / "peers.jsonl"
    peers.write_text(peers.read_text().replace("Some CPU", "Another CPU"))
    with pytest.raises(ReportError, match="peers is of another cpu"):
        report(directory)
    with pytest.raises(ReportError, match="there is none of"):
        report(tmp_path)


def test_results_need_their_revision(tmp_path: Path) -> None:
    directory = _results(tmp_path / "one")
    with pytest.raises(ReportError, match="of revision abc123, not def"):
        report(directory, revision="def")
    for path in directory.glob("*.jsonl"):
        path.write_text(path.read_text().replace('"abc123"', "null"))
    with pytest.raises(ReportError, match="--revision"):
        report(directory)
    assert "revision def" in report(directory, revision="def")


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    results = str(_results(tmp_path / "one"))
    assert main([results, "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n2026-01-02")
    assert text.endswith(f"|\n\n{END}\nbehind\n")
    assert "old" not in text
    assert main([results, "--page", str(page)]) == 0
    assert page.read_text() == text
    for broken in ("no markers", f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ReportError, match="must hold"):
            replace_tables(broken, "tables")


def test_the_page_can_take_tables() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "new tables" in replace_tables(page, "new tables")
