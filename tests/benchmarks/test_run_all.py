"""One command runs the parts, keeps to their time and leaves a summary whatever became of them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import run_all
from benchmarks.records import EXIT_REFUSED, EXIT_VOID, Recorder, read_records, table
from benchmarks.run_all import PARTS, Part, run_part
from benchmarks.summary import SUMMARIES, summarize


def test_one_part_and_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    status = run_all.main(
        ["--tiny", "--device", "cpu", "--out", str(out), "--pair", str(tmp_path / "pair"), "--only", "sampling"]
    )
    printed = capfd.readouterr().out
    assert status == 0, printed
    assert "verify sampling, ms" in printed
    summary = (out / "summary.txt").read_text()
    assert "sampling: done in" in summary
    assert "== serve ==\nwas not run" in summary


def test_a_part_without_its_pair_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "results"
    flags = ["--tiny", "--device", "cpu", "--out", str(out), "--pair", str(tmp_path / "none"), "--only", "steps"]
    assert run_all.main(flags) == 1
    assert "steps: left out, there is no pair" in (out / "summary.txt").read_text()


def test_no_part_outlasts_the_whole_budget(tmp_path: Path) -> None:
    out = tmp_path / "results"
    flags = ["--tiny", "--device", "cpu", "--out", str(out), "--only", "sampling", "--budget-seconds", "20"]
    assert run_all.main(flags) == 1
    assert "sampling: left out, the time is up" in (out / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("pass", "done in"),
        (f"raise SystemExit({EXIT_REFUSED})", "REFUSED in"),
        (f"raise SystemExit({EXIT_VOID})", "done, with VOID runs in"),
        ("raise SystemExit(9)", "FAILED with exit status 9 in"),
        ("import time; time.sleep(60)", "stopped after 1 s"),
    ],
)
def test_what_became_of_a_part(code: str, outcome: str) -> None:
    assert run_part(Part("part", 1.0), [sys.executable, "-c", code], 1.0 if "sleep" in code else 30.0).startswith(
        outcome
    )


def test_the_parts_fit_into_the_time_for_everything() -> None:
    assert sum(part.seconds for part in PARTS) <= run_all.BUDGET_SECONDS


def test_every_part_has_a_program_and_a_table_of_its_own() -> None:
    assert set(SUMMARIES) == {part.name for part in PARTS} - {"pair"}
    for part in PARTS:
        assert importlib.util.find_spec(f"benchmarks.{part.name}") is not None


def test_arrivals_are_short_unless_tiny(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "arrivals")
    options = argparse.Namespace(out=tmp_path, device="auto", tiny=False)
    command = run_all.command_of(part, options, tmp_path / "pair", 99.0)
    assert "--shares" in command
    assert command[command.index("--budget-seconds") + 1] == "99"
    assert "--shares" not in run_all.command_of(
        part, argparse.Namespace(**{**options.__dict__, "tiny": True}), tmp_path, 99
    )


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [([], ""), (["left_out"], "1 left out"), (["failed", "left_out", "failed"], "2 FAILED, 1 left out")],
)
def test_a_part_that_ended_well_with_runs_missing_is_no_success(
    kinds: list[str], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "sampling.jsonl"

    def run(*_arguments: object) -> str:
        recorder = Recorder(path, "sampling", torch.device("cpu"))
        for kind in kinds:
            recorder.write(kind, what="batch 1", reason="planted")
        return "done in 1 s"

    monkeypatch.setattr(run_all, "run_part", run)
    flags = ["--tiny", "--device", "cpu", "--out", str(path.parent), "--only", "sampling"]
    assert run_all.main(flags) == bool(kinds)
    outcome = f"{missing}; done in 1 s" if missing else "done in 1 s"
    assert f"sampling: {outcome}\n" in (path.parent / "summary.txt").read_text()


def test_figures_of_an_earlier_run_do_not_stand_for_a_part_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorder(tmp_path / "sampling.jsonl", "sampling", torch.device("cpu"))
    (tmp_path / "sampling.png").touch()
    monkeypatch.setattr(run_all, "run_part", lambda *_arguments: "FAILED with exit status 1 in 1 s")
    assert run_all.main(["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "sampling"]) == 1
    assert "== sampling ==\nwas not run" in (tmp_path / "summary.txt").read_text()
    assert not (tmp_path / "sampling.png").exists()


def test_records_are_on_disk_at_once_and_survive_being_cut_off(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "steps.jsonl", "steps", torch.device("cpu"))
    recorder.write("target_step", batch_size=1, num_positions=5, graph_ms=1.5, eager_ms=2.0, floor_ms=1.0)
    assert len(read_records(recorder.path)) == 2
    with recorder.path.open("a") as file:
        file.write(json.dumps({"kind": "target_step"})[:-4])
    assert len(read_records(recorder.path)) == 2
    assert "1 x 5" in summarize(tmp_path)


def test_a_refusal_stands_in_the_summary(tmp_path: Path) -> None:
    Recorder(tmp_path / "peers.jsonl", "peers", torch.device("cpu")).write("refused", reason="planted")
    assert "== peers ==\nREFUSED: planted" in summarize(tmp_path)


def test_table_aligns_and_shows_what_is_missing() -> None:
    text = table(("batch", "ms"), [("1", 12345.6), ("64", 0.01234), ("x", None)])
    assert text.splitlines() == ["batch      ms", "-----  ------", "1      12,346", "64     0.0123", "x           -"]
