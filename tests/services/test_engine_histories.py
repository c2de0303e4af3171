"""The verifier's engine over a real model, with steps in flight, through everything that can happen to it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.model_runner import ModelRunner
from tests.services.bare_engine import Clock, decode_alone
from tests.services.histories import History
from tests.services.known_answers import Answer, known_answers
from tests.tiny_models import save_tiny_llama

VOCABULARY, MAX_LENGTH, BLOCK = 64, 64, 16
NUM_HISTORIES, NUM_MOVES = 40, 400


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that seldom repeats itself, so that a token too many or too few shows."""
    path = tmp_path_factory.mktemp("target")
    return save_tiny_llama(path, vocab_size=VOCABULARY, num_layers=2, seed=4, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def runners(target: Path) -> list[ModelRunner]:
    """One whose cache holds all that may run, and one whose sequences drive each other out."""
    return [
        ModelRunner(
            target,
            device=torch.device("cpu"),
            dtype=torch.float32,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_batched_tokens=MAX_LENGTH,
        )
        for num_blocks in (24, 7)
    ]


@pytest.fixture(scope="module")
def answers(target: Path, runners: list[ModelRunner]) -> list[Answer]:
    return known_answers(
        target, vocab_size=VOCABULARY, max_length=MAX_LENGTH, decode_alone=partial(decode_alone, runners[0])
    )


# A simulation in which these do not happen as often proves nothing; about a third of what there is.
AT_LEAST = {
    "tokens": 4000,
    "accepted drafts": 250,
    "accepted drafts of coupled sequences": 50,
    "full acceptances": 120,
    "rejections": 25,
    "chained": 1000,
    "chained behind a prompt": 50,
    "chained behind drafts": 4,
    "rode along": 80,
    "prompts beside decoding": 350,
    "preemptions": 15,
    "closed in flight": 12,
    "lost in flight": 8,
    "fallback FALLBACK_REASON_DRAFTER_LOST": 40,
    "fallback FALLBACK_REASON_DRAFTER_MAX_LENGTH": 10,
    "fallback FALLBACK_REASON_DRAFTER_OVERLOADED": 7,
    "late": 5,
    "overtaken frames": 40,
    "illegal frames": 5,
    "repeated frames": 8,
    "silent links": 2,
    "idle links": 2,
    "broke down at launch": 10,
    "broke down in flight": 10,
    "failed": 30,
    "turned away": 20,
    "FINISH_REASON_LENGTH": 120,
    "FINISH_REASON_EOS": 30,
    "FINISH_REASON_STOP_TOKEN": 25,
}


@pytest.mark.slow
def test_whatever_happens_the_tokens_are_the_targets_own(
    runners: list[ModelRunner],
    answers: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a token, a log-probability or an end that depends on what else the engine has to do.

    Also an engine that sleeps while there is work, a slot or block that two have or nobody, a row that breaks the
    executor's contract, and a failure that concerns more than it should.
    """
    for package in ("verifier_service", "drafter_service"):
        caplog.set_level(logging.CRITICAL, package)  # they have a lot to complain of
    seen: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        history = History(seed, runners[seed % len(runners)], answers, Clock.patched(monkeypatch))
        try:
            history.play(NUM_MOVES)
        except Exception as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        seen += history.seen
    too_rare = {what: seen[what] for what, number in AT_LEAST.items() if seen[what] < number}
    assert not too_rare, seen
