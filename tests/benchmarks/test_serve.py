"""serve.py runs the real services, refuses where speculation changes the output, and calls void what is void."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serve
from benchmarks.load import Request, Wave, Workload, why_void
from benchmarks.pair import PairDirectory
from benchmarks.parity import check_parity
from benchmarks.records import EXIT_REFUSED, RefusalError, of_kind, read_records
from benchmarks.serve_plot import save_plot
from outrider.client import ClientError, TokenOrigin
from outrider.devices import Devices

_ORIGINS = [TokenOrigin.PLAIN, TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS]


def _flags(pair: PairDirectory, out: Path) -> list[str]:
    return ["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)]


@pytest.mark.slow
def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.jsonl"
    flags = ["--temperatures", "1", "--waves", "1", "--plot", str(tmp_path / "serve.png")]
    flags += ["--verifications", "rejection", "coupled"]
    assert serve.main([*_flags(pair, out), *flags]) == 0, capsys.readouterr().out
    records = read_records(out)
    check = of_kind(records, "check")[0]
    # In float32 nothing excuses a difference.
    assert check["num_identical"] == check["num_sequences"]
    runs = of_kind(records, "serve")
    modes = [(4, "rejection"), (4, "coupled"), (None, "rejection")]
    assert [(run["batch_size"], run["num_draft_tokens"], run["verification"]) for run in runs] == [
        (batch_size, *mode) for batch_size in (1, 3) for mode in modes
    ]
    assert not any(run["void"] for run in runs)
    for run in runs:
        assert run["tokens_per_second"] > 0
        assert run["time_to_first_token_ms"] > 0
        assert run["total_output_tokens"] == run["batch_size"] * 24
        assert (run["acceptance_length"] > 1.5) == (run["num_draft_tokens"] is not None)
        assert set(run["cores"]) == {"gateway", "verifier", "drafter", "client"}
    printed = capsys.readouterr().out
    assert "tokens/step" in printed
    assert "first draft tokens accepted" in printed
    assert "K = 4, coupled" in printed


def _request(token_ids: Sequence[int], *, second_choice: int = 9, gap: float = 1.0) -> Request:
    request = Request(0.0, token_ids=list(token_ids), origins=[_ORIGINS[i % 4] for i in range(len(token_ids))])
    request.logprobs = [-0.1 for _ in token_ids]
    request.top_logprobs = [{token: -0.1, second_choice: -0.1 - gap} for token in token_ids]
    return request


def test_a_difference_is_refused() -> None:
    same = [_request([1, 2, 3, 4])]
    assert check_parity(same, same, "cpu").num_identical == 1
    with pytest.raises(RefusalError, match="differ from token 2 on"):
        check_parity(same, [_request([1, 2, 9, 4])], "cuda")


def test_a_near_tie_is_not_held_against_bfloat16() -> None:
    one, other = [_request([1, 2, 3, 4], gap=0.25)], [_request([1, 2, 9, 4], second_choice=3, gap=0.25)]
    assert check_parity(one, other, "cuda").num_near_ties == 1
    with pytest.raises(RefusalError, match=r"0\.250 nats"):
        check_parity(one, other, "cpu")


def test_an_output_that_is_cut_off_is_refused() -> None:
    with pytest.raises(RefusalError, match="differ from token 3 on"):
        check_parity([_request([1, 2, 3, 4])], [_request([1, 2, 3])], "cuda")


def test_a_token_that_is_not_the_most_likely_is_refused() -> None:
    wrong = _request([1, 2, 3, 4])
    wrong.top_logprobs[1] = {7: -0.01, 2: -3.0}
    wrong.logprobs[1] = -3.0
    with pytest.raises(RefusalError, match="token 1 of prompt 0 is not the most likely"):
        check_parity([wrong], [wrong], "cuda")


def test_a_comparison_without_rejections_proves_nothing() -> None:
    request = _request([1, 2, 3, 4])
    request.origins = [TokenOrigin.ACCEPTED] * 4
    with pytest.raises(RefusalError, match="proves nothing"):
        check_parity([request], [request], "cpu")


def test_a_wrong_service_gets_no_results(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: with speculation the services put out another token."""

    @asynccontextmanager
    async def no_cluster(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(address="127.0.0.1:1", devices=Devices("cpu", ("cpu",)))

    async def wave(_client: object, workload: Workload, prompts: Sequence[object], **_: object) -> Wave:
        tokens = [1, 2, 9, 4] if workload.is_speculative else [1, 2, 3, 4]
        return Wave([_request(tokens) for _ in prompts], 1.0)

    async def at_once(_client: object) -> None:
        return

    monkeypatch.setattr(serve, "make_cluster", no_cluster)
    monkeypatch.setattr(serve, "run_wave", wave)
    monkeypatch.setattr(serve, "wait_for_drafter", at_once)
    out = tmp_path / "serve.jsonl"
    assert serve.main(_flags(pair, out)) == EXIT_REFUSED
    records = read_records(out)
    assert "greedy outputs of prompt 0 differ" in of_kind(records, "refused")[0]["reason"]
    assert not of_kind(records, "serve")
    assert "REFUSED" in capsys.readouterr().out


def test_services_that_fail_get_no_results_and_show_their_logs(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = SimpleNamespace(name="verifier", is_running=True, log_tail=lambda _: "ValueError: planted")

    @asynccontextmanager
    async def failing_cluster(*_: object, **__: object) -> AsyncIterator[Any]:
        devices = Devices("cpu", ("cpu",))
        yield SimpleNamespace(
            address="127.0.0.1:1", devices=devices, gateway=process, verifier=process, drafter=process
        )

    async def no_wave(*_: object, **__: object) -> Wave:
        raise ClientError("the target model failed")

    monkeypatch.setattr(serve, "make_cluster", failing_cluster)
    monkeypatch.setattr(serve, "run_wave", no_wave)
    out = tmp_path / "serve.jsonl"
    assert serve.main(_flags(pair, out)) == 1
    assert of_kind(read_records(out), "failed")[0]["reason"] == "the target model failed"
    assert "ValueError: planted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"num_drafted_tokens": 0, "fallbacks": {"NO_DRAFTER": 2}}, "nothing was drafted: {'NO_DRAFTER': 2}"),
        ({"num_accepted_tokens": 0}, "no draft token was accepted"),
        ({"total_output_tokens": 19}, "19 tokens came, not 20"),
        ({"origins": {"PLAIN": 14}}, "12 of 20 tokens came from steps without drafts"),
    ],
)
def test_speculation_that_did_not_happen_is_void(changes: dict[str, Any], reason: str | None) -> None:
    result = {
        "num_requests": 2,
        "total_output_tokens": 20,
        "num_drafted_tokens": 16,
        "num_accepted_tokens": 12,
        "origins": {"PLAIN": 2, "ACCEPTED": 12, "RECOVERED": 3, "BONUS": 3},
        "fallbacks": {},
        **changes,
    }
    workload = Workload(2, 1.0, 4, num_output_tokens=10)
    assert why_void(workload, result, num_fallen_back=0) == reason


def test_a_sequence_that_fell_back_and_a_plain_run_with_drafts_are_void() -> None:
    result = {
        "num_requests": 2,
        "total_output_tokens": 20,
        "num_drafted_tokens": 16,
        "num_accepted_tokens": 12,
        "origins": {},
        "fallbacks": {"DRAFTER_LOST": 1},
    }
    reason = why_void(Workload(2, 1.0, 4, num_output_tokens=10), result, num_fallen_back=1)
    assert reason is not None
    assert "1 of 2 sequences fell back" in reason
    assert why_void(Workload(2, 1.0, None, num_output_tokens=10), result, 0) == "there were drafts in a plain run"


def test_void_runs_stay_out_of_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        {"kind": "serve", "batch_size": 1, "temperature": 1.0, "num_draft_tokens": 4, "void": "nothing was drafted"}
    ]
    assert "VOID: 1 x T 1: nothing was drafted" in serve.summary(records)
    assert not save_plot(records, tmp_path / "plot.png")
    assert "no plot" in capsys.readouterr().out
