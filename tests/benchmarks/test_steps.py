"""steps.py runs through, and reports nothing when the runner computes something else than transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pair import PairDirectory
from benchmarks.records import EXIT_REFUSED, of_kind, read_records
from benchmarks.steps import main
from engine.batch import Batch, SequenceSlice, build_batch
from engine.model_runner import ModelRunner


def _run(pair: PairDirectory, out: Path, *flags: str) -> int:
    return main(["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out), *flags])


def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.jsonl"
    assert _run(pair, out) == 0
    records = read_records(out)
    assert [(r["batch_size"], r["num_positions"]) for r in of_kind(records, "target_step")] == [
        (1, 1), (1, 5), (2, 1), (2, 5)
    ]  # fmt: skip
    assert [r["batch_size"] for r in of_kind(records, "drafter_loop")] == [1, 2]
    assert len(of_kind(records, "matrix_products")) == 4
    assert all(min(r["graph_ms"], r["eager_ms"]) > r["floor_ms"] > 0 for r in of_kind(records, "target_step"))
    assert {r["model"] for r in of_kind(records, "check")} == {"target", "drafter"}
    assert "drafter's loop, ms" in capsys.readouterr().out


def test_leaves_out_what_there_is_no_time_for(pair: PairDirectory, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    assert _run(pair, out, "--budget-seconds", "0") == 0
    records = read_records(out)
    assert of_kind(records, "left_out")
    assert not of_kind(records, "target_step")


def test_refuses_a_graph_that_computes_something_else(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the positions of the batch that is captured are off by one."""

    def wrong(*args: Any, **options: Any) -> Batch:
        batch = build_batch(*args, **options)
        return dataclasses.replace(batch, positions=batch.positions + 1)

    monkeypatch.setattr("benchmarks.steps.build_batch", wrong)
    out = tmp_path / "steps.jsonl"
    assert _run(pair, out) == EXIT_REFUSED
    assert "a replayed graph's logits" in of_kind(read_records(out), "refused")[0]["reason"]


@pytest.mark.parametrize("fault", ["neighbour's row", "one percent", "nan"])
def test_refuses_wrong_logits(
    fault: str, pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute = ModelRunner.execute

    def wrong(self: ModelRunner, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        logits = execute(self, slices)
        match fault:
            case "neighbour's row":
                return logits.roll(1, 0)
            case "one percent":
                return logits * 1.01
            case _:
                return torch.where(torch.arange(len(logits)).unsqueeze(1) == 0, torch.nan, logits)

    monkeypatch.setattr(ModelRunner, "execute", wrong)
    out = tmp_path / "steps.jsonl"
    assert _run(pair, out) == EXIT_REFUSED
    records = read_records(out)
    assert of_kind(records, "refused")
    assert not of_kind(records, "target_step")
    assert "REFUSED, no results" in capsys.readouterr().out
