"""Other engines on the same pair, plain and speculating: transformers, which is always there, and vLLM where it is.

    python -m benchmarks.peers --pair DIR --out FILE

transformers' assisted generation is speculative decoding within one process, with the same number of draft tokens and
the same verification rule, one request at a time. Greedy outputs with and without assistance are compared first. vLLM
runs the waves of `benchmarks.serve`, its offline engine in processes of their own (`benchmarks/peer_vllm.py`): on one
GPU, and in tensor parallel where there are two. Where it is not installed, it is left out and a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import run_child
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.pair_weights import load_reference
from benchmarks.parity import NEAR_TIE
from benchmarks.records import (
    EXIT_VOID,
    Record,
    Recorder,
    RefusalError,
    of_kind,
    progress,
    read_records,
    remarks,
    run_refusable,
    table,
)
from benchmarks.timing import free_memory, resolve_device, synchronize

# Beyond the time after which a vLLM begins nothing new.
_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Generated:
    """One generation."""

    token_ids: list[int]  # without the prompt
    seconds: float
    num_target_passes: int


class TransformersPeer:
    """Generates with the pair's two models."""

    def __init__(self, pair: PairDirectory, device: torch.device, num_draft_tokens: int) -> None:
        self._device = device
        self.target = load_reference(pair.target, pair.shape.target, device, attention="sdpa")
        self._drafter = load_reference(pair.drafter, pair.shape.drafter, device, attention="sdpa")
        # Always K draft tokens: no schedule, and no stop where the drafter is unsure.
        self._drafter.generation_config.num_assistant_tokens = num_draft_tokens
        self._drafter.generation_config.num_assistant_tokens_schedule = "constant"
        self._drafter.generation_config.assistant_confidence_threshold = 0.0
        self._num_passes = 0
        self.target.register_forward_hook(self._count)

    def generate(
        self, prompt: Sequence[int], *, num_tokens: int, temperature: float, is_assisted: bool, seed: int
    ) -> Generated:
        """Continue one prompt."""
        torch.manual_seed(seed)
        input_ids = torch.tensor([list(prompt)], device=self._device)
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if is_assisted:
            options["assistant_model"] = self._drafter
        self._num_passes = 0
        synchronize(self._device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                pad_token_id=0,
                **options,
            )
        synchronize(self._device)
        seconds = time.perf_counter() - start
        return Generated(output[0, len(prompt) :].tolist(), seconds, self._num_passes)

    @torch.inference_mode()
    def gap(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float | None:
        """How far apart, in nats, the tokens are where two continuations part; None where they do not."""
        for place, (left, right) in enumerate(zip(one, other, strict=False)):
            if left != right:
                ids = torch.tensor([[*prompt, *one[:place]]], device=self._device)
                logits = self.target(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
                return float((logits[left] - logits[right]).abs())
        return None

    def _count(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        self._num_passes += 1


def _run(
    peer: TransformersPeer, recorder: Recorder, prompts: Sequence[Sequence[int]], num_tokens: int, deadline: float
) -> int:
    plain = [
        peer.generate(prompt, num_tokens=num_tokens // 4, temperature=0, is_assisted=False, seed=0)
        for prompt in prompts[:2]
    ]
    assisted = [
        peer.generate(prompt, num_tokens=num_tokens // 4, temperature=0, is_assisted=True, seed=0)
        for prompt in prompts[:2]
    ]
    for number, (prompt, one, other) in enumerate(zip(prompts, plain, assisted, strict=False)):
        gap = peer.gap(prompt, one.token_ids, other.token_ids)
        tolerance = NEAR_TIE[peer.target.device.type]
        if gap is not None and not gap <= tolerance:
            raise RefusalError(f"greedy outputs of prompt {number} differ by {gap:.3f} nats with assistance")
        recorder.write("check", prompt=number, gap=gap)
    progress("greedy outputs agree")
    for temperature in (1.0, 0.0):
        for is_assisted in (False, True):
            what = f"temperature {temperature:g}, {'assisted' if is_assisted else 'plain'}"
            if time.monotonic() > deadline:
                recorder.write("left_out", what=what)
                progress(f"left out, the time is up: {what}")
                continue
            runs = []
            for seed, prompt in enumerate(prompts):
                runs.append(
                    peer.generate(
                        prompt, num_tokens=num_tokens, temperature=temperature, is_assisted=is_assisted, seed=seed
                    )
                )
            record = recorder.write(
                "transformers",
                temperature=temperature,
                is_assisted=is_assisted,
                tokens_per_second=statistics.median(len(run.token_ids) / run.seconds for run in runs),
                acceptance_length=sum(len(run.token_ids) for run in runs) / sum(run.num_target_passes for run in runs),
                void=_why_void(runs, num_tokens, is_assisted),
            )
            progress(
                f"{what}: {record['tokens_per_second']:.1f} tokens/s, {record['acceptance_length']:.2f} tokens a step"
                + (f", VOID: {record['void']}" if record["void"] else "")
            )
    return EXIT_VOID if any(record["void"] for record in of_kind(recorder.records, "transformers")) else 0


def run_vllm(pair: PairDirectory, recorder: Recorder, options: argparse.Namespace, deadline: float) -> int:
    """vLLM plain and speculating, on one GPU and on two; the exit status. Records what became of each."""
    if importlib.util.find_spec("vllm") is None:
        recorder.write("absent", what="vLLM", reason="it is not installed here")
        progress("vLLM is not installed here: left out")
        return 0
    has_two = options.device == "auto" and torch.cuda.device_count() > 1
    engines = [(gpus, limit) for gpus in ((1, 2) if has_two else (1,)) for limit in (None, options.num_draft_tokens)]
    status = 0
    for number, (num_gpus, num_draft_tokens) in enumerate(engines):
        what = f"vLLM on {num_gpus} GPUs, {'plain' if num_draft_tokens is None else f'K = {num_draft_tokens}'}"
        # An equal share of what is left: starting takes each of them most of its time.
        seconds = (deadline - time.monotonic()) / (len(engines) - number)
        if seconds <= 0:
            recorder.write("left_out", what=what)
            progress(f"left out, the time is up: {what}")
            continue
        out = recorder.path.with_name(f"{recorder.path.stem}-vllm.jsonl")
        out.unlink(missing_ok=True)
        ended = run_child(
            _vllm_command(options, pair, out, num_gpus, num_draft_tokens, seconds),
            seconds + _GRACE_SECONDS,
            environment=vllm_environment(options.device),
        )
        for record in read_records(out):
            if record["kind"] != "environment":
                recorder.write(**record)
        out.unlink(missing_ok=True)
        if ended not in (0, EXIT_VOID):
            reason = "stopped, the time was up" if ended is None else f"exit status {ended}"
            recorder.write("failed", what=what, reason=reason)
            progress(f"FAILED: {what}: {reason}")
        status = max(status, EXIT_VOID if ended else 0)
    return status


def _vllm_command(
    options: argparse.Namespace,
    pair: PairDirectory,
    out: Path,
    num_gpus: int,
    num_draft_tokens: int | None,
    seconds: float,
) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.peer_vllm", "--pair", str(pair.path), "--out", str(out)]
    command += ["--tensor-parallel", str(num_gpus), "--output-tokens", str(options.batch_output_tokens)]
    command += ["--batch-sizes", *map(str, options.batch_sizes), "--budget-seconds", f"{seconds:.0f}"]
    return command if num_draft_tokens is None else [*command, "--num-draft-tokens", str(num_draft_tokens)]


def vllm_environment(device: str) -> dict[str, str]:
    """The environment of a child that shall see one GPU only, where the command line names one."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return dict(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = visible.split(",")[int(index or 0)] if visible else index or "0"
    return {**os.environ, "CUDA_VISIBLE_DEVICES": chosen}


def _why_void(runs: Sequence[Generated], num_tokens: int, is_assisted: bool) -> str | None:
    if any(len(run.token_ids) != num_tokens for run in runs):
        return f"not all runs have {num_tokens} tokens"
    num_steps = sum(run.num_target_passes for run in runs)
    if is_assisted and num_steps >= sum(len(run.token_ids) for run in runs):
        return "no draft token was accepted"
    return None


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded."""
    rows = [
        (
            f"{record['temperature']:g}",
            "assisted" if record["is_assisted"] else "plain",
            "VOID" if record["void"] else record["tokens_per_second"],
            record["acceptance_length"],
        )
        for record in of_kind(records, "transformers")
    ]
    lines = ["transformers, batch 1", table(("T", "mode", "tokens/s", "tokens/step"), rows)]
    if runs := of_kind(records, "vllm"):
        lines += ["", f"vLLM {runs[0]['version']}, waves as in serve", _vllm_table(runs)]
        lines += [
            f"VOID: vLLM, batch {run['batch_size']}, {_mode(run)}, {run['tensor_parallel']} GPUs: {run['void']}"
            for run in runs
            if run["void"]
        ]
    return "\n".join(lines)


def _vllm_table(runs: Sequence[Record]) -> str:
    rows = [
        (
            str(run["tensor_parallel"]),
            str(run["batch_size"]),
            f"{run['temperature']:g}",
            _mode(run),
            "VOID" if run["void"] else run["tokens_per_second"],
            run["acceptance_length"],
        )
        for run in runs
    ]
    return table(("GPUs", "batch", "T", "mode", "tokens/s", "tokens/step"), rows)


def _mode(run: Record) -> str:
    return "plain" if run["num_draft_tokens"] is None else f"K = {run['num_draft_tokens']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=128, help="a request (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="requests of each kind (default %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64], help="of vLLM")
    parser.add_argument("--batch-output-tokens", type=int, default=256, help="of vLLM (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", output_tokens=32, batch_sizes=[1, 3], batch_output_tokens=24)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "peers", device)

    def measure() -> int:
        pair = pair_of(options, device)
        recorder.write("pair", shape=pair.request.shape_name, agreement=pair.measured.agreement)
        numbers = random.Random(0)
        vocab_size = pair.shape.target.vocab_size
        prompts = [[numbers.randrange(vocab_size) for _ in range(128)] for _ in range(options.prompts)]
        progress("loading both models with transformers")
        peer = TransformersPeer(pair, device, options.num_draft_tokens)
        status = _run(peer, recorder, prompts, options.output_tokens, deadline)
        del peer
        free_memory(device)
        status = max(status, run_vllm(pair, recorder, options, deadline))
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return status

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
