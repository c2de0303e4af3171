"""sampling.py runs through, and reports nothing when the stage does not do what p and q say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.records import EXIT_REFUSED, of_kind, read_records
from benchmarks.sampling import TINY, main
from benchmarks.sampling_case import SamplingCase
from kernels.rejection_sample import RejectionSample

_NUM_CASES = 2 * (len(TINY.batches) + len(TINY.coupled_batches) + 2 * len(TINY.draft_batches))


def _run(out: Path) -> int:
    return main(["--tiny", "--device", "cpu", "--out", str(out)])


def test_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sampling.jsonl"
    assert _run(out) == 0
    records = read_records(out)
    timed = of_kind(records, "verify_sampling") + of_kind(records, "draft_sampling")
    assert len(timed) == _NUM_CASES
    assert all(record["graph_ms"] > 0 and record["floor_ms"] > 0 for record in timed)
    assert "verify sampling, ms" in capsys.readouterr().out


def test_refuses_what_is_not_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the seeds do not reach the kernel."""
    on_cpu = SamplingCase.on_cpu

    def other_seeds(self: SamplingCase) -> SamplingCase:
        return dataclasses.replace(on_cpu(self), seeds=torch.zeros_like(self.seeds))

    monkeypatch.setattr(SamplingCase, "on_cpu", other_seeds)
    out = tmp_path / "sampling.jsonl"
    assert _run(out) == EXIT_REFUSED
    assert "differ from the reference" in of_kind(read_records(out), "refused")[0]["reason"]


def test_refuses_a_stage_that_accepts_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: kernel and reference share a fault and accept every draft."""
    sample = SamplingCase.sample

    def accept_all(self: SamplingCase) -> RejectionSample:
        result = sample(self)
        return dataclasses.replace(result, num_accepted=self.cu_num_draft_tokens.diff())

    monkeypatch.setattr(SamplingCase, "sample", accept_all)
    out = tmp_path / "sampling.jsonl"
    assert _run(out) == EXIT_REFUSED
    records = read_records(out)
    assert "p and q say" in of_kind(records, "refused")[0]["reason"]
    assert not of_kind(records, "verify_sampling")
