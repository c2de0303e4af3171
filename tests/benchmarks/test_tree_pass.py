"""tree_pass.py runs through, and reports nothing when nodes see other keys than their ancestors'."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pair import PairDirectory
from benchmarks.records import EXIT_REFUSED, of_kind, read_records
from benchmarks.tree_pass import main
from kernels.node_keys import NodeKeys, collect_node_keys


def _run(pair: PairDirectory, out: Path, *flags: str) -> int:
    return main(["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out), *flags])


def test_tiny_run(pair: PairDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tree_pass.jsonl"
    assert _run(pair, out) == 0
    records = read_records(out)
    for kind in ("tree_pass", "tree_attention"):
        timed = of_kind(records, kind)
        assert [(record["batch_size"], record["num_nodes"]) for record in timed] == [(1, 8), (3, 2)]
        assert all(min(record["tree_ms"], record["causal_ms"]) > record["floor_ms"] > 0 for record in timed)
        # More than the pass computes, fewer than there are.
        assert all(record["num_nodes"] < record["num_seen"] < 4 * record["num_nodes"] for record in timed)
    assert [record["num_pairs"] for record in of_kind(records, "copy_kv")] == [8, 24]
    assert "attention of all layers, ms" in capsys.readouterr().out


def test_leaves_out_what_there_is_no_time_for(pair: PairDirectory, tmp_path: Path) -> None:
    out = tmp_path / "tree_pass.jsonl"
    assert _run(pair, out, "--budget-seconds", "0") == 0
    records = read_records(out)
    assert [record["what"] for record in of_kind(records, "left_out")] == ["1 x 8", "3 x 2"]
    assert not of_kind(records, "tree_pass")


def test_refuses_a_mask_that_is_not_kept(pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every node of a sequence sees what any of them sees."""

    def all_see_all(is_ancestor: torch.Tensor, *arguments: Any) -> NodeKeys:
        keys = collect_node_keys(is_ancestor, *arguments)
        return dataclasses.replace(keys, seen_by=torch.full_like(keys.seen_by, -1))

    monkeypatch.setattr("engine.model_runner.collect_node_keys", all_see_all)
    out = tmp_path / "tree_pass.jsonl"
    assert _run(pair, out) == EXIT_REFUSED
    records = read_records(out)
    assert "logits of nodes in chains" in of_kind(records, "refused")[0]["reason"]
    assert not of_kind(records, "tree_pass")
