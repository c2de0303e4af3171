"""Fused models against transformers' eager ones: same logits, and nothing fused that computes something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.attention import (
    ATTENTION_NAME,
    AttentionCall,
    CachedAttention,
    UnsupportedAttentionError,
    register_attention,
)
from engine.batch import SequenceSlice, build_batch
from engine.fused_modules import FusedNorm
from engine.fusion import FusionReport, fuse
from engine.kv_cache import KVCache, LayerShape
from kernels.dispatch import interpreted_kernels
from kernels.paged_attention import paged_attention, paged_attention_reference

VOCAB_SIZE = 99
BLOCK_SIZE = 16
NUM_BLOCKS = 12
NUM_LAYERS = 3
TOKEN_IDS = torch.randint(VOCAB_SIZE, (46,), generator=torch.Generator().manual_seed(0)).tolist()


def small(config_class: Callable[..., PreTrainedConfig], **options: Any) -> Callable[[], PreTrainedConfig]:
    shared = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return lambda: config_class(**(shared | options))


WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# Whose decoder layers are fused as a whole.
WHOLE = {
    "llama": small(transformers.LlamaConfig),
    "llama with biases": small(transformers.LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama with yarn": small(transformers.LlamaConfig, rope_parameters=YARN),
    "qwen2": small(transformers.Qwen2Config, use_sliding_window=True, sliding_window=16, layer_types=WINDOWS),
    "qwen3": small(transformers.Qwen3Config, head_dim=32),
    "mistral": small(transformers.MistralConfig, sliding_window=16, head_dim=24),
    "gemma": small(transformers.GemmaConfig, head_dim=16),
    "gemma2": small(
        transformers.Gemma2Config,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        layer_types=WINDOWS,
    ),
    "gemma3": small(
        transformers.Gemma3TextConfig, head_dim=16, sliding_window=16, query_pre_attn_scalar=16, layer_types=WINDOWS
    ),
}
# Which keep parts of their own: how many attentions and MLPs are fused in each, and what the report says of the rest.
IN_PARTS = {
    "granite scales its residuals": (
        small(transformers.GraniteConfig, residual_multiplier=0.3, attention_multiplier=0.2),
        NUM_LAYERS,
        NUM_LAYERS,
        "decoder layer's output: differs by",
    ),
    "olmo clips its queries": (small(transformers.OlmoConfig, clip_qkv=6.0), 0, NUM_LAYERS, "attention's queries"),
    "olmo2 normalises all heads together": (small(transformers.Olmo2Config), 0, NUM_LAYERS, "not over single heads"),
    "mixtral has experts": (
        small(transformers.MixtralConfig, num_local_experts=4),
        NUM_LAYERS,
        0,
        "no gated MLP that could be fused",
    ),
    "phi3 is packed already": (small(transformers.Phi3Config), 0, 0, "no attention that could be fused"),
    "cohere rotates neighbours": (small(transformers.CohereConfig), 0, NUM_LAYERS, "attention's queries"),
    "smollm3 has layers without positions": (
        small(transformers.SmolLM3Config, no_rope_layers=[1, 0, 1]),
        0,
        1,
        "attention's queries",
    ),
    "gpt2 is another kind": (
        lambda: transformers.GPT2Config(
            n_embd=64,
            n_layer=NUM_LAYERS,
            n_head=4,
            vocab_size=VOCAB_SIZE,
            n_positions=512,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        ),
        0,
        0,
        "no attention that could be fused",
    ),
}


class Storing(CachedAttention):
    """Lets the fused attention write to the cache."""

    def cache_slots(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.key_caches[layer_index], self.value_caches[layer_index], self.slot_mapping

    def attend_stored(self, call: AttentionCall, query: torch.Tensor) -> torch.Tensor:
        # On a CPU never interpreted: attention has tests of its own.
        attend = paged_attention if query.is_cuda else paged_attention_reference
        return attend(
            query,
            self.key_caches[call.layer_index],
            self.value_caches[call.layer_index],
            self.cu_query_lens,
            self.context_lens,
            self.block_tables,
            scale=call.scale,
            max_query_len=self.max_query_len,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
        )


class Handing:
    """Takes keys and values and stores them itself."""

    def __init__(self, cached: CachedAttention) -> None:
        self.attend = cached.attend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the fused model runs: on the references, or with the Triton kernels on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device(request.param)


def new_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Random weights, in a copy of the config."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        deepcopy(config), attn_implementation=attention
    )
    return model


def make_models(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random weights, for transformers' eager attention on the CPU and for the paged kernels on the device."""
    register_attention()
    torch.manual_seed(0)
    oracle = new_model(config, "eager")
    with torch.no_grad():
        # Fresh norms are all ones and fresh biases all zeros: what a fusion forgets would not be missed.
        for parameter in oracle.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model = new_model(config, ATTENTION_NAME)
    model.load_state_dict(oracle.state_dict())
    for either, place in ((oracle, torch.device("cpu")), (model, device)):
        either.to(place, dtype)  # type: ignore[arg-type]  # transformers declares it without `self`
        either.train(False).requires_grad_(False)
    return oracle, model


class Session:
    """One sequence over a paged cache."""

    def __init__(self, model: Any, device: torch.device, *, stores: bool = True) -> None:
        self.model = model
        self.device = device
        self.stores = stores
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.cache = KVCache(
            [LayerShape(num_kv_heads, head_dim)] * NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
            device=device,
        )

    def inputs(self, start: int, end: int) -> dict[str, Any]:
        batch = build_batch(
            [SequenceSlice(TOKEN_IDS[start:end], start, [7, 2, 9, 4], end - start)],
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            device=self.device,
        )
        paged = Storing(
            key_caches=self.cache.keys,
            value_caches=self.cache.values,
            slot_mapping=batch.slot_mapping,
            cu_query_lens=batch.cu_query_lens,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            max_query_len=batch.max_query_len,
        )
        return {
            "input_ids": batch.token_ids.unsqueeze(0),
            "position_ids": batch.positions.unsqueeze(0),
            "use_cache": False,
            "paged": paged if self.stores else Handing(paged),
        }

    @torch.inference_mode()
    def step(self, start: int, end: int) -> torch.Tensor:  # [end - start, vocab_size] on the CPU
        logits: torch.Tensor = self.model(**self.inputs(start, end)).logits[0]
        return logits.cpu()

    def run(self) -> torch.Tensor:  # [len(TOKEN_IDS), vocab_size]
        """A prompt, its second chunk, a verify step and a single token."""
        return torch.cat([self.step(0, 30), self.step(30, 40), self.step(40, 45), self.step(45, 46)])


@torch.inference_mode()
def oracle_logits(oracle: Any) -> torch.Tensor:  # [len(TOKEN_IDS), vocab_size]
    logits: torch.Tensor = oracle(torch.tensor([TOKEN_IDS])).logits[0]
    return logits


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4 * max(1.0, float(expected.abs().max())), rtol=0.0)
    assert torch.equal(logits.argmax(dim=1), expected.argmax(dim=1))


@pytest.mark.parametrize("family", list(WHOLE))
def test_whole_layers(device: torch.device, family: str) -> None:
    oracle, model = make_models(WHOLE[family](), torch.float32, device)
    report = fuse(model)
    assert report == FusionReport(
        layers=tuple(f"model.layers.{index}" for index in range(NUM_LAYERS)),
        attentions=(),
        mlps=(),
        norms=("model.norm",),
        rotary_embeddings=("model.rotary_emb",),
        left_alone=(),
    )
    assert report.is_complete
    expected = oracle_logits(oracle)
    assert_same(Session(model, device).run(), expected)
    if device.type == "cpu":
        assert_same(Session(model, device, stores=False).run(), expected)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.float32), ("gemma3", torch.float16)])
def test_on_interpreted_kernels(family: str, dtype: torch.dtype) -> None:
    """The Triton kernels in their places; bfloat16 is left out because the interpreter rounds it towards zero."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton interprets only where there is no GPU")
    oracle, model = make_models(WHOLE[family](), dtype, torch.device("cpu"))
    session = Session(model, torch.device("cpu"))
    with interpreted_kernels():
        assert fuse(model).is_complete
        logits = torch.cat([session.step(0, 5), session.step(5, 8)])
    expected = oracle_logits(oracle.float())[:8]  # type: ignore[no-untyped-call]
    atol = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(logits.float(), expected, atol=atol * float(expected.abs().max()), rtol=0.0)


@pytest.mark.parametrize("family", list(IN_PARTS))
def test_other_structures_stay_correct(family: str) -> None:
    """What cannot be fused runs as before, what can be is, and the report says which."""
    make_config, num_attentions, num_mlps, reason = IN_PARTS[family]
    oracle, model = make_models(make_config(), torch.float32, torch.device("cpu"))
    report = fuse(model)
    inside = len(report.layers)
    assert len(report.attentions) == num_attentions
    assert len(report.mlps) == num_mlps
    assert not report.is_complete
    assert any(reason in left.reason for left in report.left_alone)
    assert reason in str(report)
    layers = {left.module for left in report.left_alone if left.module.count(".") == 2}
    assert len(layers) == NUM_LAYERS - inside
    assert_same(Session(model, torch.device("cpu")).run(), oracle_logits(oracle))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_half_precision(device: torch.device, family: str, dtype: torch.dtype) -> None:
    """No further from the float32 model than transformers' own modules in the same type."""
    exact, _ = make_models(WHOLE[family](), torch.float32, device)
    oracle, model = make_models(WHOLE[family](), dtype, device)
    exact.load_state_dict(oracle.state_dict())  # the rounded weights
    assert fuse(model).is_complete
    expected = oracle_logits(exact)
    error = (Session(model, device).run().float() - expected).norm()
    eager_error = (oracle_logits(oracle).float() - expected).norm()
    assert error <= 1.25 * eager_error


def test_weights_are_held_once() -> None:
    _, model = make_models(WHOLE["llama with biases"](), torch.float32, torch.device("cpu"))

    def num_bytes() -> int:
        storages = {parameter.untyped_storage() for parameter in model.parameters()}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    before, state = num_bytes(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert fuse(model).is_complete
    assert num_bytes() == before
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()


def test_inputs_of_a_layer_are_not_changed() -> None:
    """The last product is added in place, but not onto what the caller holds."""
    _, model = make_models(WHOLE["llama"](), torch.float32, torch.device("cpu"))
    fuse(model)
    session = Session(model, torch.device("cpu"))
    inputs = session.inputs(0, 5)
    hidden = model.model.embed_tokens(inputs["input_ids"])
    before = hidden.clone()
    position_embeddings = model.model.rotary_emb(hidden, inputs["position_ids"])
    output = model.model.layers[0](hidden, position_embeddings=position_embeddings, paged=inputs["paged"])
    assert torch.equal(hidden, before)
    assert not torch.equal(output, before)


def test_fused_layers_refuse_what_they_would_leave_out() -> None:
    _, model = make_models(WHOLE["llama"](), torch.float32, torch.device("cpu"))
    fuse(model)
    inputs = Session(model, torch.device("cpu")).inputs(0, 5)
    with pytest.raises(UnsupportedAttentionError, match="`paged`"):
        model(**(inputs | {"paged": None}))
    with pytest.raises(UnsupportedAttentionError, match="past_key_values"):
        model(**(inputs | {"use_cache": True}))


class _Louder(nn.Module):
    """A norm with the parts of an RMSNorm that does something else."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


def _change_norm(layer: Any) -> None:
    layer.post_attention_layernorm = _Louder(layer.post_attention_layernorm)


def _change_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.Softsign()


def _change_layer(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda hidden_states, **options: 1.01 * forward(hidden_states, **options)


def _change_quietly(layer: Any) -> None:
    """What the layer adds is small beside its input, and wrong by a twentieth."""
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.mul_(1e-4)
    forward = layer.forward
    layer.forward = lambda hidden_states, **options: torch.lerp(hidden_states, forward(hidden_states, **options), 1.05)


def _change_attention(layer: Any) -> None:
    attention = layer.self_attn
    forward = attention.forward
    # Only far from zero, as an activation's outliers would be.
    attention.forward = lambda **options: forward(
        **(options | {"hidden_states": options["hidden_states"].clamp(-20.0, 20.0)})
    )


def _change_projection(layer: Any) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(x)

    layer.self_attn.k_proj.__class__ = Scaled


def _add_branch(layer: Any) -> None:
    layer.adapter = nn.Linear(64, 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_change_norm, "computes something else"),
        (_change_activation, "neither SiLU nor GELU"),
        (_change_layer, "decoder layer's output: differs by"),
        (_change_quietly, "decoder layer's output: differs by"),
        (_change_attention, "attention's queries: differs by"),
        (_change_projection, "no attention that could be fused"),
        (_add_branch, "more parts than"),
    ],
)
def test_looks_alike_and_is_not(change: Callable[[Any], None], reason: str) -> None:
    """The structure is Llama's, the behaviour is not: the layer stays as it is, the others are fused."""
    oracle, model = make_models(WHOLE["llama"](), torch.float32, torch.device("cpu"))
    changed: Any
    for changed in (oracle, model):
        change(changed.model.layers[1])
    report = fuse(model)
    assert report.layers == ("model.layers.0", "model.layers.2")
    assert any(left.module.startswith("model.layers.1") and reason in left.reason for left in report.left_alone)
    assert_same(Session(model, torch.device("cpu")).run(), oracle_logits(oracle))


def test_frequencies_that_follow_the_batch_stay() -> None:
    """LongRoPE looks at the longest sequence of a batch: one table of frequencies would not."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.1] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config = small(transformers.LlamaConfig, rope_parameters=rope)()
    oracle, model = make_models(config, torch.float32, torch.device("cpu"))
    report = fuse(model)
    assert [left.module for left in report.left_alone] == ["model.rotary_emb"]
    assert len(report.layers) == NUM_LAYERS
    assert_same(Session(model, torch.device("cpu")).run(), oracle_logits(oracle))


def test_all_is_undone_where_the_whole_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort: parts that pass their checks and a model that differs all the same."""
    oracle, model = make_models(WHOLE["qwen3"](), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(FusedNorm, "__call__", lambda self, hidden_states: 1.1 * hidden_states)
    report = fuse(model)
    assert report.layers == report.norms == report.rotary_embeddings == ()
    assert "whole model's logits: differs by" in str(report)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(Session(model, torch.device("cpu")).run(), oracle_logits(oracle))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_fits_a_cuda_graph(family: str) -> None:
    """A captured step gives the same logits for new inputs, and nothing in it waits for the device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device = torch.device("cuda")
    _, model = make_models(WHOLE[family](), torch.bfloat16, device)
    assert fuse(model).is_complete
    session = Session(model, device)
    session.step(0, 40)
    expected = session.step(40, 45)
    with torch.inference_mode():
        inputs = session.inputs(40, 45)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        inputs["input_ids"].fill_(0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = model(**inputs).logits[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        inputs["input_ids"].copy_(torch.tensor([TOKEN_IDS[40:45]]))
        graph.replay()
    torch.testing.assert_close(logits.cpu(), expected, atol=0.0, rtol=0.0)
