"""peers.py runs through, and reports nothing when assistance changes greedy output."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pair import PairDirectory
from benchmarks.peers import Generated, TransformersPeer, main
from benchmarks.records import EXIT_REFUSED, of_kind, read_records


def _flags(pair: PairDirectory, out: Path) -> list[str]:
    return ["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)]


def test_tiny_run(pair: PairDirectory, tmp_path: Path) -> None:
    out = tmp_path / "peers.jsonl"
    assert main(_flags(pair, out)) == 0
    runs = of_kind(read_records(out), "transformers")
    assert [(run["temperature"], run["is_assisted"]) for run in runs] == [
        (1.0, False), (1.0, True), (0.0, False), (0.0, True)
    ]  # fmt: skip
    assert all((run["acceptance_length"] > 1.5) == run["is_assisted"] for run in runs)
    assert all(run["acceptance_length"] <= 5 for run in runs)


def test_refuses_when_assistance_changes_the_output(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TransformersPeer.generate

    def wrong(self: TransformersPeer, *args: Any, **options: Any) -> Generated:
        generated = generate(self, *args, **options)
        if not options["is_assisted"]:
            return generated
        token_ids = list(generated.token_ids)
        token_ids[3] = (token_ids[3] + 1) % pair.shape.target.vocab_size
        return dataclasses.replace(generated, token_ids=token_ids)

    monkeypatch.setattr(TransformersPeer, "generate", wrong)
    out = tmp_path / "peers.jsonl"
    assert main(_flags(pair, out)) == EXIT_REFUSED
    assert not of_kind(read_records(out), "transformers")
