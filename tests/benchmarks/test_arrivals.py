"""arrivals.py runs the real services under traffic, and its tables compare only what may be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import arrivals
from benchmarks.arrivals_tables import summary, traffic_ratios
from benchmarks.pair import PairDirectory
from benchmarks.records import Recorder, of_kind, read_records
from benchmarks.traffic import Traffic

_MODES = [None, 4]


@pytest.mark.slow
def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "arrivals.jsonl"
    flags = ["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)]
    lengths = ["--seconds", "2.5", "--closed-seconds", "2", "--skip-seconds", "0"]
    # Time enough for a machine that has other work as well, and no judgement of its speed.
    patience = ["--drain-seconds", "60", "--max-lag-ms", "5000"]
    status = arrivals.main([*flags, *lengths, *patience, "--rates", "3", "--uniform", "--special-share", "0.5"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    records = read_records(out)
    closed, opened = of_kind(records, "closed_loop"), of_kind(records, "open_loop")
    loads = [(mode, traffic) for mode in _MODES for traffic in ("mixed", "uniform")]
    assert [(run["num_draft_tokens"], run["traffic"]) for run in closed] == loads
    assert [(run["num_draft_tokens"], run["traffic"]) for run in opened] == loads
    assert all(run["concurrency"] == 2 and run["tokens_per_second"] > 0 for run in closed)
    # All get the same requests at the same moments, and all of these are answered.
    num_arrivals = len(Traffic().arrival_times(3.0, 2.5))
    assert num_arrivals > 3
    assert [run["num_finished"] for run in opened] == [num_arrivals] * 4
    assert [bool(run["num_special"]) for run in opened] == [True, False] * 2
    for run in opened:
        assert run["first_token_p99_ms"] >= run["first_token_p50_ms"] > 0
        assert (run["acceptance_length"] > 1) == (run["num_draft_tokens"] is not None)
    assert "x uniform" in printed
    assert "goodput/s" in printed


def _recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "arrivals.jsonl", "arrivals", torch.device("cpu"))


def _closed(recorder: Recorder, speed: float, traffic: str, **fields: Any) -> None:
    figures = {f"{name}_{cut}_ms": 1.0 for name in ("first_token", "token") for cut in ("p50", "p99")}
    common: dict[str, Any] = {
        "concurrency": 8,
        "round": 0,
        "num_draft_tokens": None,
        "void": None,
        "fallbacks": {},
        **figures,
    }
    recorder.write(
        "closed_loop", **{**common, "tokens_per_second": speed, "traffic": traffic, "acceptance_length": 1.0, **fields}
    )


def test_mixed_traffic_is_compared_round_by_round_and_not_with_void_runs(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    for number, (mixed, uniform) in enumerate([(90.0, 100.0), (190.0, 200.0), (97.0, 100.0)]):
        _closed(recorder, mixed, "mixed", round=number)
        _closed(recorder, uniform, "uniform", round=number)
    _closed(recorder, 10.0, "mixed", round=3)
    _closed(recorder, 100.0, "uniform", round=3, void="the generator was late")
    _closed(recorder, 10.0, "mixed", num_draft_tokens=4)
    assert traffic_ratios(recorder.records) == {(8, None): pytest.approx([0.9, 0.95, 0.97])}
    text = summary(recorder.records)
    assert "0.950 (0.900 to 0.970)" in text
    assert "VOID: 8 open, plain, uniform: the generator was late" in text


def test_capacity_is_that_of_the_target_alone_with_most_requests_open(tmp_path: Path) -> None:
    recorder, traffic = _recorder(tmp_path), Traffic()
    assert arrivals.capacity_of(recorder.records, traffic) is None
    _closed(recorder, 900.0, "mixed", concurrency=64, num_draft_tokens=4)
    _closed(recorder, 100.0, "mixed")
    _closed(recorder, 500.0, "mixed", concurrency=64)
    _closed(recorder, 700.0, "uniform", concurrency=64)
    _closed(recorder, 999.0, "mixed", concurrency=128, void="planted")
    assert arrivals.capacity_of(recorder.records, traffic) == pytest.approx(500 / traffic.mean_output_tokens())


def test_uniform_without_special_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        arrivals.main(["--tiny", "--uniform", "--special-share", "0", "--out", str(tmp_path / "x.jsonl")])
