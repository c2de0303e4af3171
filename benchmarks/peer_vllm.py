"""vLLM on the same pair and the waves of `benchmarks.serve`: a child of `benchmarks.peers`, one process an engine.

    python -m benchmarks.peer_vllm --pair DIR --out FILE --num-draft-tokens 4 --tensor-parallel 2

Its offline engine takes a whole batch at once and returns when all of it is done: no network and no gateway are in its
figures, which flatters it a little beside the services'.

`VllmPeer` alone touches vLLM. It follows the documentation and the examples of vLLM 0.25 and has not been run by its
author, who had no GPU; all around it is tested with a stand-in for the module.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.load import Workload, random_prompts
from benchmarks.pair import open_pair
from benchmarks.records import EXIT_VOID, Recorder, of_kind, progress, version_of

# Of the GPU's memory: enough for an 8B pair on a GPU of 80 GB, beside what the parent process still holds.
_MEMORY_SHARE = 0.6


class VllmPeer:
    """vLLM's offline engine over local weights. Not run by its author; see the module's docstring."""

    def __init__(
        self,
        target: Path,
        drafter: Path | None,
        *,
        num_draft_tokens: int,
        tensor_parallel: int,
        max_batch_size: int,
        max_length: int,  # tokens of a prompt and its output
    ) -> None:
        # Not a dependency of ours, and slow to import.
        self._vllm = importlib.import_module("vllm")
        config = importlib.import_module("vllm.config")
        speculative: dict[str, Any] | None = None
        if drafter is not None:
            speculative = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": num_draft_tokens}
            # Drafts sampled from q and held against it; by default they are the likeliest tokens, and above
            # temperature 0 fewer of them are accepted.
            if any(field.name == "draft_sample_method" for field in dataclasses.fields(config.SpeculativeConfig)):
                speculative["draft_sample_method"] = "probabilistic"
        self.draft_sample_method = (speculative or {}).get("draft_sample_method")
        self._engine = self._vllm.LLM(
            model=str(target),
            skip_tokenizer_init=True,  # the pair has no tokenizer
            tensor_parallel_size=tensor_parallel,
            speculative_config=speculative,
            max_model_len=max_length,
            max_num_seqs=max_batch_size,
            gpu_memory_utilization=_MEMORY_SHARE,
            enable_prefix_caching=False,
            disable_log_stats=False,  # get_metrics needs them
            seed=0,
        )

    def generate(self, prompts: Sequence[Sequence[int]], *, num_tokens: int, temperature: float) -> list[int]:
        """Continue all prompts at once; how many tokens each one got."""
        parameters = self._vllm.SamplingParams(
            temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._engine.generate(inputs, parameters, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def counters(self) -> tuple[float, float]:
        """Proposals verified and draft tokens accepted since the engine started."""
        values = {metric.name: getattr(metric, "value", 0.0) for metric in self._engine.get_metrics()}
        return (
            values.get("vllm:spec_decode_num_drafts", 0.0),
            values.get("vllm:spec_decode_num_accepted_tokens", 0.0),
        )


def measure(peer: VllmPeer, workload: Workload, *, vocab_size: int, num_waves: int) -> dict[str, Any]:
    """The figures of one workload after a warm-up, with why they are void if they are."""
    brief = dataclasses.replace(workload, num_output_tokens=min(24, workload.num_output_tokens))
    _wave(peer, brief, vocab_size, seed=77)
    drafts_before, accepted_before = peer.counters()
    waves = [_wave(peer, workload, vocab_size, seed=number) for number in range(num_waves)]
    drafts, accepted = peer.counters()
    num_drafts, num_accepted = drafts - drafts_before, accepted - accepted_before
    counts = [count for counts, _ in waves for count in counts]
    void = None
    if counts != [workload.num_output_tokens] * (num_waves * workload.batch_size):
        void = f"not all requests got {workload.num_output_tokens} tokens"
    elif workload.is_speculative and not num_accepted:
        void = "no draft token was accepted" if num_drafts else "nothing was drafted"
    elif not workload.is_speculative and num_drafts:
        void = "there were drafts in a plain run"
    speeds = sorted(sum(counts) / seconds for counts, seconds in waves)
    return {
        "tokens_per_second": speeds[len(speeds) // 2],
        "wave_seconds": [round(seconds, 4) for _, seconds in waves],
        "acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
        "void": void,
    }


def _wave(peer: VllmPeer, workload: Workload, vocab_size: int, *, seed: int) -> tuple[list[int], float]:
    prompts = random_prompts(workload, vocab_size, seed=seed)
    start = time.perf_counter()
    counts = peer.generate(prompts, num_tokens=workload.num_output_tokens, temperature=workload.temperature)
    return counts, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="directory of the pair")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--num-draft-tokens", type=int, help="K; without it the target alone")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs (default %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--output-tokens", type=int, default=256, help="a request (default %(default)s)")
    parser.add_argument("--waves", type=int, default=3, help="measured a workload (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=200.0, help="begin no new workload after this")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    # CUDA belongs to vLLM's own processes: this one must not touch it before they are started.
    recorder = Recorder(options.out, "vllm", torch.device("cpu"))
    pair = open_pair(options.pair)
    limit: int | None = options.num_draft_tokens
    longest = 128 + options.output_tokens
    progress(f"starting vLLM {version_of('vllm')}, K = {limit}, on {options.tensor_parallel} GPUs")
    peer = VllmPeer(
        pair.target,
        None if limit is None else pair.drafter,
        num_draft_tokens=limit or 0,
        tensor_parallel=options.tensor_parallel,
        max_batch_size=max(options.batch_sizes),
        # The last steps may draft beyond the end.
        max_length=min(longest + 16, pair.shape.target.max_length),
    )
    for temperature in options.temperatures:
        for batch_size in options.batch_sizes:
            workload = Workload(batch_size, temperature, limit, num_output_tokens=options.output_tokens)
            what = f"vLLM, {workload.name}, {options.tensor_parallel} GPUs"
            if time.monotonic() > deadline:
                recorder.write("left_out", what=what)
                progress(f"left out, the time is up: {what}")
                continue
            found = measure(peer, workload, vocab_size=pair.shape.target.vocab_size, num_waves=options.waves)
            recorder.write(
                "vllm",
                version=version_of("vllm"),
                tensor_parallel=options.tensor_parallel,
                draft_sample_method=peer.draft_sample_method,
                **workload.__dict__,
                **found,
            )
            progress(f"VOID: {what}: {found['void']}" if found["void"] else f"{what}: {found['tokens_per_second']:.1f}")
    return EXIT_VOID if any(run["void"] for run in of_kind(recorder.records, "vllm")) else 0


if __name__ == "__main__":
    sys.exit(main())
