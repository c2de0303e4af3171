"""The split of a cycle adds up, and comes from the services' own spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cycle
from benchmarks.cycle import cycles_of, split_of
from benchmarks.pair import PairDirectory
from benchmarks.records import of_kind, read_records
from benchmarks.trace_collector import Span


def _spans() -> list[Span]:
    first = Span("verify_step", 10.0, 10.004, {"outrider.position": 100})
    second = Span("verify_step", 10.010, 10.015, {"outrider.position": 103, "outrider.draft_wait_seconds": 0.005})
    return [second, Span("draft tiny", 10.0055, 10.0085, {"outrider.position": 103}), first, Span("queue", 9, 9.5, {})]


def test_the_parts_add_up() -> None:
    (found,) = cycles_of(_spans())
    assert found.total == pytest.approx(0.010)
    assert found.verify == pytest.approx(0.004)
    assert found.draft == pytest.approx(0.003)
    assert found.transport == pytest.approx(0.002)
    assert found.host == pytest.approx(0.001)
    assert found.total == pytest.approx(found.verify + found.draft + found.transport + found.host)


def test_without_drafts_there_is_no_split() -> None:
    assert split_of([[span for span in _spans() if not span.name.startswith("draft")]]) is None
    assert split_of([]) is None


@pytest.mark.slow
def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cycle.jsonl"
    flags = ["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)]
    assert cycle.main(flags) == 0, capsys.readouterr().out
    records = of_kind(read_records(out), "cycle")
    assert [record["batch_size"] for record in records] == [1, 2]
    for record in records:
        assert record["num_cycles"] > 3
        assert record["draft_ms"] > 0
        assert record["verify_ms"] > 0
        assert record["transport_ms"] > 0
    assert "forward + sampling" in capsys.readouterr().out
