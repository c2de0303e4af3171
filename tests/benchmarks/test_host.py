"""The host's time around a step is counted over the real engines, drafting and verifying included."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host
from benchmarks.records import of_kind, read_records
from benchmarks.summary import summarize


@pytest.mark.parametrize("batch_size", [1, 20])
def test_every_stage_is_passed_as_often_as_the_others(batch_size: int) -> None:
    """Catches a loop that speculates once and then decodes plainly, whose stages would still have medians."""
    num_turns = 30
    watch = host.measure(batch_size, num_candidates=8, num_turns=num_turns)
    counts = {name: len(watch.seconds[name]) for name in host.STAGES}
    # One step a turn; a turn also asks in vain, once or twice, what there is to schedule or to report.
    for name in ("collect", "commit", "draft", "answer", "check drafts", "launch"):
        assert counts[name] == pytest.approx(num_turns, abs=2), name
    assert min(counts.values()) >= num_turns - 2
    assert all(min(watch.seconds[name]) >= 0 for name in host.STAGES)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.jsonl"
    assert host.main(["--out", str(out), "--batch-sizes", "2", "--candidates", "8", "--turns", "20"]) == 0
    (record,) = of_kind(read_records(out), "host")
    assert set(record["microseconds"]) == set(host.STAGES)
    assert "verifier's, on the way" in capsys.readouterr().out
    assert "batch 2" in summarize(tmp_path)
