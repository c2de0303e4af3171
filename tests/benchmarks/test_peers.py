"""peers.py runs through, reports nothing when assistance changes greedy output, and runs vLLM where it is installed."""

from __future__ import annotations

import argparse
import dataclasses
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
from benchmarks.peers import Generated, TransformersPeer, main, run_vllm, summary
from benchmarks.records import EXIT_REFUSED, EXIT_VOID, Recorder, of_kind, read_records, remarks

# Takes what we give to vLLM's offline engine, and nothing else; accepts two of each proposal's tokens.
_STANDIN = """
    import json, pathlib, types

    HERE = pathlib.Path(__file__).parents[1]
    FAULT = (HERE / "fault.txt").read_text()

    class SamplingParams:
        def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
            assert ignore_eos and not detokenize
            self.max_tokens, self.temperature = max_tokens, temperature

    class LLM:
        def __init__(self, model, *, skip_tokenizer_init, tensor_parallel_size, speculative_config, max_model_len,
                     max_num_seqs, gpu_memory_utilization, enable_prefix_caching, disable_log_stats, seed):
            if FAULT == "start":
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
            num_tokens = parameters.max_tokens - (FAULT == "short")
            if self.speculative:
                self.drafts += 10 * len(inputs)
                self.accepted += 0 if FAULT == "rejected" else 20 * len(inputs)
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * num_tokens)]) for _ in inputs]

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
    """A directory with a module `vllm`, for this process and its children; `fault.txt` says what is wrong with it."""
    directory = tmp_path / "standin"
    (directory / "vllm").mkdir(parents=True)
    (directory / "vllm/__init__.py").write_text(textwrap.dedent(_STANDIN))
    (directory / "vllm/config.py").write_text(textwrap.dedent(_STANDIN_CONFIG))
    (directory / "fault.txt").touch()
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
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
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


def test_vllm_gets_the_waves_of_serve_plain_and_speculating(pair: PairDirectory, tmp_path: Path, standin: Path) -> None:
    status, recorder = _run_vllm(pair, tmp_path)
    assert status == 0
    runs = of_kind(recorder.records, "vllm")
    assert [(run["num_draft_tokens"], run["batch_size"]) for run in runs] == [(None, 1), (None, 3), (4, 1), (4, 3)]
    assert [run["acceptance_length"] for run in runs] == [None, None, 3.0, 3.0]
    assert all(run["tokens_per_second"] > 0 and run["void"] is None and run["tensor_parallel"] == 1 for run in runs)
    engines = [json.loads(line) for line in (standin / "engines.txt").read_text().splitlines()]
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
    assert [len(wave) for wave in prompts] == [1, 1, 1, 1, 3, 3, 3, 3] * 2
    assert "3.00" in summary(recorder.records)


def test_vllm_in_tensor_parallel_where_there_are_two_gpus(
    pair: PairDirectory, tmp_path: Path, standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _, recorder = _run_vllm(pair, tmp_path, "auto")
    assert [run["tensor_parallel"] for run in of_kind(recorder.records, "vllm")] == [1] * 4 + [2] * 4


def test_a_gpu_that_was_named_is_the_only_one_that_vllm_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in peers.vllm_environment("auto")
    assert peers.vllm_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert peers.vllm_environment("auto")["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert peers.vllm_environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "7"
    assert peers.vllm_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    ("fault", "void"), [("short", "not all requests got 24 tokens"), ("rejected", "no draft token was accepted")]
)
def test_a_vllm_that_did_something_else_is_void(
    fault: str, void: str, pair: PairDirectory, tmp_path: Path, standin: Path
) -> None:
    (standin / "fault.txt").write_text(fault)
    status, recorder = _run_vllm(pair, tmp_path)
    assert status == EXIT_VOID
    runs = of_kind(recorder.records, "vllm")
    assert runs[-1]["void"] == void
    assert f"VOID: vLLM, batch 3, K = 4, 1 GPUs: {void}" in summary(recorder.records)


def test_a_vllm_that_fails_or_has_no_time_is_told_of(pair: PairDirectory, tmp_path: Path, standin: Path) -> None:
    (standin / "fault.txt").write_text("start")
    status, recorder = _run_vllm(pair, tmp_path)
    assert status == EXIT_VOID
    assert "FAILED: vLLM on 1 GPUs, K = 4: exit status 1" in remarks(recorder.records)
    _, recorder = _run_vllm(pair, tmp_path, seconds=0.0)
    assert "left out, the time was up: vLLM on 1 GPUs, plain" in remarks(recorder.records)
