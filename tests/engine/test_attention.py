"""The attention function refuses what it would otherwise leave out in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from engine.attention import (
    ATTENTION_NAME,
    AttentionCall,
    UnsupportedAttentionError,
    attention_forward,
    register_attention,
)


class Layer(torch.nn.Module):
    layer_idx = 3
    is_causal: bool


class Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert query.shape == (5, 4, 8)
        assert key.shape == value.shape == (5, 2, 8)
        self.calls.append(call)
        return query


def attend(module: torch.nn.Module, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    output, weights = attention_forward(module, query, key, key, mask, **options)
    assert weights is None
    torch.testing.assert_close(output, query.transpose(1, 2))
    return output


def test_options_of_the_layer_arrive() -> None:
    recorder = Recorder()
    attend(Layer(), paged=recorder, scaling=0.5, sliding_window=7, softcap=30.0, dropout=0.0, s_aux=None)
    attend(Layer(), paged=recorder)
    assert recorder.calls == [AttentionCall(3, 0.5, 7, 30.0), AttentionCall(3, 8**-0.5, None, None)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(4)}, "position bias"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "mask of its own"),
        ({"is_causal": False}, "not causal"),
        ({"paged": None}, "does not receive the `paged` argument"),
    ],
)
def test_unsupported(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=problem):
        attend(Layer(), **({"paged": Recorder()} | options))


def test_unsupported_modules() -> None:
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(UnsupportedAttentionError, match="not causal"):
        attend(layer, paged=Recorder())
    with pytest.raises(UnsupportedAttentionError, match="layer_idx"):
        attend(torch.nn.Linear(1, 1), paged=Recorder())


def test_no_mask_is_built_under_this_name() -> None:
    register_attention()
    register_attention()
    assert ATTENTION_NAME in AttentionInterface().valid_keys()  # type: ignore[no-untyped-call]
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
