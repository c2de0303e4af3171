"""Time of the target's step and of the drafter's K-token loop, beside the memory floor and the bare matrix products.

    python -m benchmarks.steps --pair DIR --out FILE

`graph` is the forward pass in a CUDA graph, which is how the services run it; `eager` is `ModelRunner.execute` from the
call to the end of its work on the device, host work included. `wall` of the drafter's loop is a turn, from verdicts to
draft tokens on the host. `floor` is the bytes that must be read (weights once, keys and values once) over the
bandwidth of a large copy, measured first. `products` are the step's matrix products alone in a CUDA graph. Logits are
compared with transformers before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import goals
from benchmarks.drafter_loop import DrafterLoop
from benchmarks.logit_check import ReferenceLogits, check_logits, reference_logits
from benchmarks.matrix_products import MatrixProducts
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.prefill import next_tokens, prefill
from benchmarks.records import (
    Record,
    Recorder,
    RefusalError,
    has_goals,
    of_kind,
    optional_ms,
    progress,
    remarks,
    run_refusable,
    table,
)
from benchmarks.timing import copy_bandwidth, free_memory, graph_milliseconds, resolve_device, wall_milliseconds
from engine.batch import SequenceSlice, build_batch
from engine.model_runner import ModelRunner

_BLOCK_SIZE = 16
_GRAPH_TOLERANCE = 0.02


class StepBenchmark:
    """Everything that is timed of one pair on one device."""

    def __init__(
        self,
        pair: PairDirectory,
        device: torch.device,
        recorder: Recorder,
        *,
        context: int,
        num_draft_tokens: int,
        deadline: float,  # on time.monotonic's clock: nothing new is begun after it
    ) -> None:
        self._pair = pair
        self._device = device
        self._recorder = recorder
        self._context = context
        self._num_draft_tokens = num_draft_tokens
        self._deadline = deadline
        self._bandwidth = copy_bandwidth(device)
        recorder.write("bandwidth", bytes_per_second=self._bandwidth)
        progress(f"copy bandwidth {self._bandwidth / 1e12:.3f} TB/s")

    def run(self, batch_sizes: Sequence[int]) -> None:
        """Check, then time. Raises RefusalError, before anything is recorded, when a check fails."""
        num_positions = self._num_draft_tokens + 1
        self._recorder.write("pair", shape=self._pair.request.shape_name, agreement=self._pair.measured.agreement)
        progress("transformers' logits of target and drafter, for the check")
        shape = self._pair.shape
        references = [
            reference_logits(directory, model_shape, self._device, num_positions=num_positions)
            for directory, model_shape in ((self._pair.target, shape.target), (self._pair.drafter, shape.drafter))
        ]
        progress("loading the drafter's runner")
        self._check("drafter", self._runner(self._pair.drafter, max(batch_sizes)), references[1])
        free_memory(self._device)
        progress("loading the target's runner")
        runner = self._runner(self._pair.target, max(batch_sizes))
        self._check("target", runner, references[0])
        self._time_target(runner, batch_sizes)
        del runner
        free_memory(self._device)
        self._time_drafter(batch_sizes)
        free_memory(self._device)
        self._time_products(batch_sizes)

    def _check(self, name: str, runner: ModelRunner, reference: ReferenceLogits) -> None:
        error = check_logits(runner, reference, num_positions=self._num_draft_tokens + 1)
        self._recorder.write("check", model=name, **error.__dict__)
        progress(f"{name}: logits off by {error.runner:.2e}, transformers' by {error.transformers:.2e}: good")

    def _time_target(self, runner: ModelRunner, batch_sizes: Sequence[int]) -> None:
        for batch_size in batch_sizes:
            sequences = prefill(runner, batch_size, self._context)
            for num_positions in (1, self._num_draft_tokens + 1):
                if self._is_late(f"target, batch {batch_size} x {num_positions}"):
                    continue
                slices = [next_tokens(ids, self._context, num_positions, runner.vocab_size) for ids in sequences]

                record = self._recorder.write(
                    "target_step",
                    batch_size=batch_size,
                    num_positions=num_positions,
                    **self._time_step(runner, slices),
                    floor_ms=self._pair.shape.target.step_bytes(batch_size, self._context) / self._bandwidth * 1e3,
                )
                progress(
                    f"target {batch_size} x {num_positions}: {optional_ms(record['graph_ms'])} in a graph, "
                    f"{record['eager_ms']:.3f} ms eager, floor {record['floor_ms']:.3f}"
                )

    def _time_step(self, runner: ModelRunner, slices: Sequence[SequenceSlice]) -> dict[str, float | str | None]:
        """The step's times. Raises RefusalError where the graph computes something else than eager execution."""
        batch = build_batch(slices, block_size=runner.block_size, num_blocks=runner.num_blocks, device=self._device)
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs[:] = [runner.forward(batch)]

        times: dict[str, float | str | None] = {"graph_ms": None}
        try:
            times["graph_ms"] = graph_milliseconds(forward, self._device, num_replays=10, num_runs=5)
        except RuntimeError as error:
            # Something in the forward pass waits for the device.
            times["graph_error"] = str(error).splitlines()[0][:200]
        else:
            eager = runner.execute(slices).float()
            error_norm = float((outputs[0].float() - eager).norm() / eager.norm())
            if not error_norm <= _GRAPH_TOLERANCE:
                raise RefusalError(f"a replayed graph's logits are off by {error_norm:.2e} from those computed eagerly")
        times["eager_ms"] = wall_milliseconds(lambda: runner.execute(slices), self._device, seconds=1.5)
        return times

    def _time_drafter(self, batch_sizes: Sequence[int]) -> None:
        if self._is_late("drafter's loop"):
            return
        progress("loading the drafter")
        shape = self._pair.shape.drafter
        loop = DrafterLoop(
            self._pair.drafter,
            self._device,
            num_draft_tokens=self._num_draft_tokens,
            num_blocks=self._num_blocks(max(batch_sizes)),
            max_batch_size=max(batch_sizes),
            takes_turns=True,
        )
        for batch_size in batch_sizes:
            if self._is_late(f"drafter's loop, batch {batch_size}"):
                continue
            one_pass = shape.step_bytes(batch_size, self._context) / self._bandwidth * 1e3
            record = self._recorder.write(
                "drafter_loop",
                batch_size=batch_size,
                num_draft_tokens=self._num_draft_tokens,
                wall_ms=loop.milliseconds(batch_size, self._context),
                device_ms=loop.device_milliseconds(batch_size),
                floor_ms=self._num_draft_tokens * one_pass,
            )
            progress(
                f"drafter {batch_size}: {record['wall_ms']:.3f} ms a loop, {optional_ms(record['device_ms'])} on the "
                f"device, floor {record['floor_ms']:.3f}"
            )

    def _time_products(self, batch_sizes: Sequence[int]) -> None:
        if self._is_late("matrix products"):
            return
        progress("bare matrix products of the target's shape")
        products = MatrixProducts(self._pair.shape.target, self._device)
        for batch_size in batch_sizes:
            for num_positions in (1, self._num_draft_tokens + 1):
                if self._is_late(f"products, batch {batch_size} x {num_positions}"):
                    continue
                record = self._recorder.write(
                    "matrix_products",
                    batch_size=batch_size,
                    num_positions=num_positions,
                    graph_ms=products.milliseconds(batch_size * num_positions),
                )
                progress(f"products {batch_size} x {num_positions}: {record['graph_ms']:.3f} ms")

    def _runner(self, directory: Path, batch_size: int) -> ModelRunner:
        runner = ModelRunner(
            directory,
            device=self._device,
            dtype=self._pair.shape.target.dtype,
            block_size=_BLOCK_SIZE,
            num_blocks=self._num_blocks(batch_size),
        )
        # Before the check as well: what the warm-up prepares is what will be timed.
        runner.warm_up()
        return runner

    def _num_blocks(self, batch_size: int) -> int:
        # Room for the longest sequences, for what the warm-up writes and for the check.
        per_sequence = -(-(self._context + 128) // _BLOCK_SIZE)
        return max(batch_size * per_sequence, 2048 // _BLOCK_SIZE) + 16

    def _is_late(self, what: str) -> bool:
        is_late = time.monotonic() > self._deadline
        if is_late:
            self._recorder.write("left_out", what=what)
            progress(f"left out, the time is up: {what}")
        return is_late


def summary(records: Sequence[Record]) -> str:
    """The tables of what was recorded."""
    is_judged = has_goals(records)
    products = {
        (record["batch_size"], record["num_positions"]): record["graph_ms"]
        for record in of_kind(records, "matrix_products")
    }
    steps = []
    for record in of_kind(records, "target_step"):
        batch_size, num_positions = record["batch_size"], record["num_positions"]
        goal = goals.TARGET_STEP_MS.get(batch_size) if is_judged and num_positions == 5 else None
        times = (record["graph_ms"], record["eager_ms"], record["floor_ms"], products.get((batch_size, num_positions)))
        steps.append((f"{batch_size} x {num_positions}", *times, goal))
    loops = []
    for record in of_kind(records, "drafter_loop"):
        goal = goals.DRAFTER_LOOP_MS.get(record["batch_size"]) if is_judged else None
        loops.append((str(record["batch_size"]), record["wall_ms"], record["device_ms"], record["floor_ms"], goal))
    return "\n".join(
        [
            "target step, ms",
            table(("batch x positions", "graph", "eager", "floor", "products", "goal"), steps),
            "",
            "drafter's loop, ms",
            table(("batch", "wall", "device", "floor", "goal"), loops),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("steps.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=140.0, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", batch_sizes=[1, 2], context=64)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "steps", device)

    def measure() -> int:
        pair = pair_of(options, device)
        benchmark = StepBenchmark(
            pair,
            device,
            recorder,
            context=options.context,
            num_draft_tokens=options.num_draft_tokens,
            deadline=deadline,
        )
        benchmark.run(options.batch_sizes)
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return 0

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
