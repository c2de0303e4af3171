"""The pair is what it was asked to be, and its drafter is the target's own beginning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import pair as pair_module
from benchmarks.pair import PairDirectory, Request, main, make_pair, open_pair
from benchmarks.pair_weights import build_pair, load_reference
from benchmarks.records import EXIT_REFUSED
from benchmarks.shapes import SHAPES

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@torch.inference_mode()
def _agreement(pair: PairDirectory) -> tuple[float, float]:
    """Agreement and target entropy, computed here from the files alone: transformers loads, and samples every token
    from a fresh forward pass."""
    auto_model: Any = AutoModelForCausalLM  # untyped
    target, drafter = (auto_model.from_pretrained(path).eval() for path in (pair.target, pair.drafter))
    torch.manual_seed(5)
    ids = torch.randint(TINY.target.vocab_size, (48, 16))
    agreements, entropies = [], []
    for _ in range(24):
        p = target(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].softmax(-1)
        q = drafter(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].softmax(-1)
        agreements.append(float(torch.minimum(p, q).sum(1).mean()))
        entropies.append(float(torch.special.entr(p).sum(1).mean()))
        ids = torch.cat([ids, torch.multinomial(p, 1)], dim=1)
    return sum(agreements) / len(agreements), sum(entropies) / len(entropies)


def test_agreement_on_disk_is_the_one_asked_for(pair: PairDirectory) -> None:
    """Catches damping that is searched but not baked in, and weights measured that are not those written."""
    agreement, entropy = _agreement(pair)
    assert agreement == pytest.approx(0.8, abs=0.03)
    assert agreement == pytest.approx(pair.measured.agreement, abs=0.03)
    assert entropy == pytest.approx(3.0, abs=0.3)
    assert pair.measured.candidate_agreement["64"] < pair.measured.candidate_agreement["256"]


def test_another_agreement_is_found_too() -> None:
    _, manifest = make_pair(Request("tiny", agreement=0.6), CPU)
    assert manifest["measured"]["agreement"] == pytest.approx(0.6, abs=0.02)


def test_drafter_is_the_targets_beginning(pair: PairDirectory) -> None:
    target, drafter = _weights(pair.target), _weights(pair.drafter)
    assert {name for name in drafter if ".layers." not in name} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    for name, tensor in drafter.items():
        torch.testing.assert_close(tensor, target[name], rtol=0, atol=0)
    layers = {name.split(".")[2] for name in drafter if ".layers." in name}
    assert layers == {str(index) for index in range(TINY.num_drafter_layers)}


def test_only_deeper_outputs_are_damped(pair: PairDirectory) -> None:
    weights = _weights(pair.target)
    damping = json.loads((pair.path / "pair.json").read_text())["damping"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        shallow = weights[f"model.layers.1.{name}.weight"].std()
        deep = weights[f"model.layers.2.{name}.weight"].std()
        assert float(deep / shallow) == pytest.approx(damping, rel=0.05)
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        shallow = weights[f"model.layers.1.{name}.weight"].std()
        assert float(weights[f"model.layers.2.{name}.weight"].std() / shallow) == pytest.approx(1.0, rel=0.1)


def test_weights_depend_on_the_seed_alone() -> None:
    one, same, other = (build_pair(TINY, seed=seed, device=CPU).target.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])


def test_step_bytes_are_those_of_the_files(pair: PairDirectory) -> None:
    read = {name: t for name, t in _weights(pair.target).items() if "norm" not in name and "embed" not in name}
    assert sum(tensor.nbytes for tensor in read.values()) == TINY.target.step_weight_bytes
    # Llama 3 8B at the copy bandwidth of one H200, as measured: 3.5 ms, and 0.66 ms for the four-layer drafter.
    large = SHAPES["8b"]
    assert large.target.step_weight_bytes / 4.25e12 * 1e3 == pytest.approx(3.53, abs=0.01)
    assert large.drafter.step_weight_bytes / 4.25e12 * 1e3 == pytest.approx(0.66, abs=0.01)
    assert large.target.kv_bytes_per_token == 131_072


def test_a_pair_that_is_there_is_not_made_again(
    pair: PairDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(pair_module, "make_pair", never)
    assert main(["--tiny", "--device", "cpu", "--out", str(pair.path)]) == 0
    assert '"damping"' in capsys.readouterr().out


def test_refuses_a_pair_that_does_not_measure_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: a search that finds nothing."""
    monkeypatch.setattr(pair_module, "calibrate", lambda *_, **__: (1.0, 2.0))
    assert main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "pair")]) == EXIT_REFUSED
    assert "REFUSED" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        open_pair(tmp_path / "pair")


def test_incomplete_weights_are_noticed(pair: PairDirectory, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="lacks"):
        load_reference(tmp_path, pair.shape.target, CPU, attention="eager")
