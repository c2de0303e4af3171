"""peers.py runs through, reports nothing when assistance changes greedy output, and runs vLLM where it is installed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.load import Workload, random_prompts
from benchmarks.pair import PairDirectory
from benchmarks.peer_vllm import measure
from benchmarks.peers import Generated, TransformersPeer, main, run_vllm, summary
from benchmarks.records import EXIT_REFUSED, EXIT_VOID, Recorder, of_kind, read_records, remarks

# Takes what we give to vLLM's offline engine, and nothing else; accepts two of each proposal's tokens.
_STANDIN = """
    import json, pathlib, types

    HERE = pathlib.Path(__file__).parents[1]

    class SamplingParams:
        def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
            assert ignore_eos and not detokenize
            self.max_tokens, self.temperature = max_tokens, temperature

    class LLM:
        def __init__(self, model, *, skip_tokenizer_init, tensor_parallel_size, speculative_config, max_model_len,
                     max_num_seqs, gpu_memory_utilization, enable_prefix_caching, disable_log_stats, seed):
            if (HERE / "fault.txt").exists():
                raise RuntimeError("planted")
            assert skip_tokenizer_init and not enable_prefix_caching and not disable_log_stats
            assert pathlib.Path(model, "config.json").exists()
            self.speculative, self.drafts, self.accepted = speculative_config, 0.0, 0.0
            note = {"gpus": tensor_parallel_size, "speculative": speculative_config, "max_num_seqs": max_num_seqs}
            with (HERE / "engines.txt").open("a") as file:
                print(json.dumps(note), file=file)

        def generate(self, inputs, parameters, *, use_tqdm):
            with (HERE / "prompts.txt").open("a") as file:
                print(json.dumps([one["prompt_token_ids"] for one in inputs]), file=file)
            if self.speculative:
                self.drafts += 10 * len(inputs)
                self.accepted += 20 * len(inputs)
            output = types.SimpleNamespace(token_ids=[0] * parameters.max_tokens)
            return [types.SimpleNamespace(outputs=[output]) for _ in inputs]

        def get_metrics(self):
            counter = lambda name, value: types.SimpleNamespace(name="vllm:spec_decode_num_" + name, value=value)
            vector = types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[1])
            return [counter("drafts", self.drafts), counter("accepted_tokens", self.accepted), vector]
"""
_STANDIN_CONFIG = """
    import dataclasses

    @dataclasses.dataclass
    class SpeculativeConfig:
        draft_sample_method: str = "greedy"
"""


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module `vllm`, for this process and its children; with `fault.txt` it does not start."""
    directory = tmp_path / "standin"
    (directory / "vllm").mkdir(parents=True)
    (directory / "vllm/__init__.py").write_text(textwrap.dedent(_STANDIN))
    (directory / "vllm/config.py").write_text(textwrap.dedent(_STANDIN_CONFIG))
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return directory


def _run_vllm(pair: PairDirectory, tmp_path: Path, device: str = "cpu", seconds: float = 60.0) -> tuple[int, Recorder]:
    recorder = Recorder(tmp_path / "peers.jsonl", "peers", torch.device("cpu"))
    options = argparse.Namespace(device=device, num_draft_tokens=4, batch_sizes=[1, 3], batch_output_tokens=24)
    return run_vllm(pair, recorder, options, time.monotonic() + seconds), recorder


def _flags(pair: PairDirectory, out: Path) -> list[str]:
    return ["--tiny", "--device", "cpu", "--pair", str(pair.path), "--out", str(out)]


def test_tiny_run(
    pair: PairDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    out = tmp_path / "peers.jsonl"
    assert main(_flags(pair, out)) == 0
    runs = of_kind(read_records(out), "transformers")
    assert [(run["temperature"], run["is_assisted"]) for run in runs] == [
        (1.0, False), (1.0, True), (0.0, False), (0.0, True)
    ]  # fmt: skip
    assert all((run["acceptance_length"] > 1.5) == run["is_assisted"] for run in runs)
    assert all(run["acceptance_length"] <= 5 for run in runs)
    assert of_kind(read_records(out), "absent") == [
        {"kind": "absent", "what": "vLLM", "reason": "it is not installed here"}
    ]
    assert "left out: vLLM: it is not installed here" in capsys.readouterr().out


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


def test_vllm_gets_the_waves_of_serve_plain_and_speculating_on_one_gpu_and_on_two(
    pair: PairDirectory, tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    status, recorder = _run_vllm(pair, tmp_path, "auto")
    assert status == 0
    runs = of_kind(recorder.records, "vllm")
    assert [(run["tensor_parallel"], run["num_draft_tokens"], run["batch_size"]) for run in runs] == [
        (num_gpus, limit, batch_size) for num_gpus in (1, 2) for limit in (None, 4) for batch_size in (1, 3)
    ]
    assert [run["acceptance_length"] for run in runs] == [None, None, 3.0, 3.0] * 2
    assert all(run["tokens_per_second"] > 0 and run["void"] is None for run in runs)
    engines = [json.loads(line) for line in (standin / "engines.txt").read_text().splitlines()]
    assert [engine["gpus"] for engine in engines] == [1, 1, 2, 2]
    assert engines[0]["speculative"] is None
    assert engines[1]["speculative"] == {
        "method": "draft_model",
        "model": str(pair.drafter),
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    prompts = [json.loads(line) for line in (standin / "prompts.txt").read_text().splitlines()]
    # For each batch size one wave to warm up and three that are measured.
    waves = [random_prompts(Workload(1, 1.0, None), pair.shape.target.vocab_size, seed=seed) for seed in (77, 0, 1, 2)]
    assert prompts[:4] == waves
    assert [len(wave) for wave in prompts] == [1, 1, 1, 1, 3, 3, 3, 3] * 4
    assert "3.00" in summary(recorder.records)


def test_a_gpu_that_was_named_is_the_only_one_that_vllm_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in peers.vllm_environment("auto")
    assert peers.vllm_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert peers.vllm_environment("auto")["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert peers.vllm_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "7"
    assert peers.vllm_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "5"


class _Engine:
    """Answers with so many tokens; each request drafts and accepts so many."""

    def __init__(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        self._num_tokens, self._step = num_tokens, (num_drafts, num_accepted)
        self._total = [1000.0, 1000.0]

    def generate(self, prompts: list[list[int]], *, num_tokens: int, temperature: float) -> list[int]:
        self._total = [total + step * len(prompts) for total, step in zip(self._total, self._step, strict=True)]
        return [self._num_tokens] * len(prompts)

    def counters(self) -> tuple[float, float]:
        return self._total[0], self._total[1]


@pytest.mark.parametrize(
    ("limit", "engine", "void"),
    [
        (4, _Engine(24, 10, 20), None),
        (None, _Engine(24, 0, 0), None),
        (None, _Engine(23, 0, 0), "not all requests got 24 tokens"),
        (4, _Engine(24, 10, 0), "no draft token was accepted"),
        (4, _Engine(24, 0, 0), "nothing was drafted"),
        (None, _Engine(24, 10, 20), "there were drafts in a plain run"),
    ],
)
def test_a_vllm_that_did_something_else_is_void(limit: int | None, engine: Any, void: str | None) -> None:
    found = measure(engine, Workload(3, 1.0, limit, num_output_tokens=24), vocab_size=99, num_waves=2)
    assert found["void"] == void
    if limit and not void:
        assert found["acceptance_length"] == 3.0
    run = {"kind": "vllm", "version": "0", "tensor_parallel": 1, "batch_size": 3, "temperature": 1.0, **found}
    text = summary([{**run, "num_draft_tokens": limit}])
    assert ("VOID" in text) == (void is not None)


def test_a_vllm_that_fails_or_has_no_time_is_told_of(pair: PairDirectory, tmp_path: Path, standin: Path) -> None:
    (standin / "fault.txt").touch()
    status, recorder = _run_vllm(pair, tmp_path)
    assert status == EXIT_VOID
    assert "FAILED: vLLM on 1 GPUs, K = 4: exit status 1" in remarks(recorder.records)
    _, recorder = _run_vllm(pair, tmp_path, seconds=0.0)
    assert "left out, the time was up: vLLM on 1 GPUs, plain" in remarks(recorder.records)
