"""Time of the verify-sampling stage, from the target's bfloat16 logits to committed tokens, and of draft sampling.

    python -m benchmarks.sampling --out FILE

`graph` is the time of a call in a CUDA graph that works through several sets of inputs, too large together for the
cache; `graph, warm` repeats one set, whose logits the cache holds where they fit, as they may right after the head's
matrix product. `floor` is each logit read once, over the bandwidth of a large copy, measured first. Results are held
against the kernels' plain-torch references before anything is timed. Drafts are verified by rejection and by coupling;
an older revision, measured through `benchmarks.compare --head-benchmarks`, leaves out what it does not have.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import goals
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
from benchmarks.sampling_case import COUPLED, HAS_COUPLING, REJECTION, Filters, SamplingCase
from benchmarks.timing import (
    copy_bandwidth,
    free_memory,
    graph_milliseconds,
    queued_milliseconds,
    resolve_device,
    wall_milliseconds,
)
from kernels.draft_sample import DraftSample, draft_sample

_NO_FILTERS = Filters()
_FILTERS = Filters(top_k=50, top_p=0.9)
_RULES = (REJECTION, COUPLED) if HAS_COUPLING else (REJECTION,)
_NUM_OUTCOMES = 4  # that a drafter names for each place in its tree
_COLD_BYTES = 160 << 20  # several times what a GPU's cache holds
_MAX_SETS = 128
# Device and reference round in different orders; a token drawn at the very edge may differ.
_MAX_DIFFERING = 0.02


@dataclass(frozen=True)
class SamplingSizes:
    """What to measure."""

    vocab_size: int
    batches: tuple[tuple[int, int], ...]  # (batch size, K)
    coupled_batches: tuple[tuple[int, int], ...]
    draft_batches: tuple[int, ...]
    num_checked: int  # sequences of the comparison with the reference
    num_counted: int  # sequences whose acceptances are counted


FULL = SamplingSizes(
    128_256,
    ((1, 4), (8, 4), (32, 4), (32, 8), (64, 4), (256, 4)),
    ((1, 4), (32, 4), (64, 4)),
    (1, 8, 32, 64, 256),
    num_checked=24,
    num_counted=512,
)
TINY = SamplingSizes(4_000, ((1, 2), (2, 2)), ((2, 2),), (2,), num_checked=6, num_counted=100)


class SamplingBenchmark:
    """All cases on one device."""

    def __init__(self, sizes: SamplingSizes, device: torch.device, recorder: Recorder, deadline: float) -> None:
        self._sizes = sizes
        self._device = device
        self._recorder = recorder
        self._deadline = deadline

    def run(self) -> None:
        """Check, then time. Raises RefusalError, before anything is timed, when a check fails."""
        for rule in _RULES:
            for filters in (_NO_FILTERS, _FILTERS):
                self._check(filters, rule)
            self._check_acceptance(rule)
        bandwidth = copy_bandwidth(self._device)
        self._recorder.write("bandwidth", bytes_per_second=bandwidth)
        # The sizes are those that the goals name, whatever the model.
        self._recorder.write("pair", shape="8b" if self._sizes is FULL else "tiny", vocab_size=self._sizes.vocab_size)
        progress(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s")
        for rule in _RULES:
            for filters in (_NO_FILTERS, _FILTERS):
                for batch_size, num_draft_tokens in (
                    self._sizes.coupled_batches if rule == COUPLED else self._sizes.batches
                ):
                    self._time_verification(batch_size, num_draft_tokens, filters, rule, bandwidth)
        for rule in _RULES:
            for filters in (_NO_FILTERS, _FILTERS):
                for batch_size in self._sizes.draft_batches:
                    self._time_drafting(batch_size, filters, rule, bandwidth)

    def _check(self, filters: Filters, rule: str) -> None:
        what = f"filters: {filters.name}, {rule}"
        num_draft_tokens = [index % 5 for index in range(self._sizes.num_checked)]
        case = SamplingCase.build(num_draft_tokens, self._sizes.vocab_size, filters, self._device, seed=1, rule=rule)
        found, wanted = case.sample(), case.on_cpu().sample()
        differs = (found.token_ids.cpu() != wanted.token_ids).any(dim=1) | (
            found.num_accepted.cpu() != wanted.num_accepted
        )
        share = float(differs.float().mean())
        if share > _MAX_DIFFERING:
            raise RefusalError(
                f"{share:.1%} of the sequences differ from the reference ({what}); at most {_MAX_DIFFERING:.0%} may"
            )
        drafts = self._draft_logits(32, seed=2)
        ours = self._draft(drafts, filters, rule)()
        reference = self._draft([part.cpu() for part in drafts], filters, rule)()
        share = float((ours.token_ids.cpu() != reference.token_ids).float().mean())
        if share > 2 * _MAX_DIFFERING:
            raise RefusalError(f"{share:.1%} of the draft tokens differ from the reference ({what})")
        self._recorder.write("check", filters=filters.name, rule=rule, differing=float(differs.float().mean()))
        progress(f"same results as the reference, {what}")

    def _check_acceptance(self, rule: str) -> None:
        """The reference may be wrong as well: what is accepted must be what p and q say."""
        num_counted = self._sizes.num_counted
        case = SamplingCase.build(
            [1] * num_counted, self._sizes.vocab_size, _NO_FILTERS, self._device, seed=3, rule=rule
        )
        expected = case.first_acceptance()
        found = float(case.sample().num_accepted.float().mean())
        tolerance = 4 * math.sqrt(expected * (1 - expected) / num_counted)
        if not abs(found - expected) <= tolerance:
            raise RefusalError(f"{found:.3f} of the drafts are accepted, p and q say {expected:.3f} +- {tolerance:.3f}")
        self._recorder.write("check", rule=rule, acceptance=found, expected_acceptance=expected)
        progress(f"{rule}: acceptance {found:.3f}, expected {expected:.3f}")

    def _time_verification(
        self, batch_size: int, num_draft_tokens: int, filters: Filters, rule: str, bandwidth: float
    ) -> None:
        name = f"verify {batch_size} x {num_draft_tokens}, {rule}, filters: {filters.name}"
        if self._is_late(name):
            return
        counts = [num_draft_tokens] * batch_size
        row_bytes = 2 * self._sizes.vocab_size
        num_bytes = batch_size * (num_draft_tokens + 1) * row_bytes
        num_sets = min(max(_COLD_BYTES // num_bytes, 1), _MAX_SETS) if self._device.type == "cuda" else 2
        cases = [
            SamplingCase.build(counts, self._sizes.vocab_size, filters, self._device, seed=10 + index, rule=rule)
            for index in range(num_sets)
        ]
        self._record(
            "verify_sampling",
            name,
            [case.sample for case in cases],
            cases[0].logit_bytes / bandwidth * 1e3,
            batch_size=batch_size,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            filters=filters.name,
        )

    def _time_drafting(self, batch_size: int, filters: Filters, rule: str, bandwidth: float) -> None:
        name = f"draft {batch_size}, {rule}, filters: {filters.name}"
        if self._is_late(name):
            return
        num_bytes = batch_size * 2 * self._sizes.vocab_size
        num_sets = min(max(_COLD_BYTES // num_bytes, 1), _MAX_SETS) if self._device.type == "cuda" else 2
        calls = [
            self._draft(self._draft_logits(batch_size, seed=50 + index), filters, rule) for index in range(num_sets)
        ]
        self._record(
            "draft_sampling",
            name,
            calls,
            num_bytes / bandwidth * 1e3,
            batch_size=batch_size,
            rule=rule,
            filters=filters.name,
        )

    def _record(
        self, kind: str, name: str, calls: Sequence[Callable[[], object]], floor_ms: float, **fields: object
    ) -> None:
        def all_sets() -> None:
            for call in calls:
                call()

        for call in calls[:1]:
            call()
        times: dict[str, float | str | None] = {"graph_ms": None, "graph_warm_ms": None}
        try:
            times["graph_ms"] = graph_milliseconds(all_sets, self._device, num_calls=len(calls), num_replays=5)
            times["graph_warm_ms"] = graph_milliseconds(calls[0], self._device, num_replays=50)
        except RuntimeError as error:
            # Something waits for the device or allocates what a graph cannot hold.
            times["graph_error"] = str(error).splitlines()[0][:200]
            progress(f"{name}: not captured: {times['graph_error']}")
        record = self._recorder.write(
            kind,
            **fields,
            **times,
            eager_wall_ms=wall_milliseconds(calls[0], self._device, seconds=1.0),
            eager_queued_ms=queued_milliseconds(calls[0], self._device),
            floor_ms=floor_ms,
            num_sets=len(calls),
        )
        free_memory(self._device)
        progress(
            f"{name}: graph {optional_ms(record['graph_ms'])}, warm {optional_ms(record['graph_warm_ms'])}, "
            f"eager {record['eager_wall_ms']:.4f}, floor {floor_ms:.4f}"
        )

    def _draft_logits(self, batch_size: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator(self._device).manual_seed(seed)
        size = (batch_size, self._sizes.vocab_size)
        return [
            (5.3 * torch.randn(size, generator=generator, device=self._device)).bfloat16(),
            torch.ones(batch_size, device=self._device),
            torch.randint(1 << 62, (batch_size,), generator=generator, device=self._device),
            torch.arange(batch_size, device=self._device),
        ]

    def _draft(self, tensors: Sequence[torch.Tensor], filters: Filters, rule: str) -> Callable[[], DraftSample]:
        """Draft tokens for rejection as they have always been; where coupling is known, with outcomes as well."""
        logits, temperature, seeds, positions = tensors
        shaping = filters.tensors(len(logits), logits.device)
        if rule == REJECTION:
            return lambda: draft_sample(logits, temperature, seeds, positions, **shaping)
        is_coupled = torch.ones(len(logits), dtype=torch.int32, device=logits.device)
        return lambda: draft_sample(
            logits, temperature, seeds, positions, is_coupled=is_coupled, num_outcomes=_NUM_OUTCOMES, **shaping
        )

    def _is_late(self, what: str) -> bool:
        is_late = time.monotonic() > self._deadline
        if is_late:
            self._recorder.write("left_out", what=what)
            progress(f"left out, the time is up: {what}")
        return is_late


def summary(records: Sequence[Record]) -> str:
    """The tables of what was recorded."""
    is_judged = has_goals(records)
    verifications = []
    for record in of_kind(records, "verify_sampling"):
        batch_size, is_filtered = record["batch_size"], record["filters"] != _NO_FILTERS.name
        has_goal = is_judged and record["num_draft_tokens"] == 4
        goal = (goals.FILTERED_SAMPLING_MS if is_filtered else goals.SAMPLING_MS).get(batch_size) if has_goal else None
        peer = goals.VLLM_SAMPLING_MS.get(batch_size) if has_goal and not is_filtered else None
        name = f"{batch_size} x {record['num_draft_tokens']}"
        verifications.append((name, record["rule"], record["filters"], *_times(record), goal, peer))
    drafts = [
        (str(record["batch_size"]), record["rule"], record["filters"], *_times(record))
        for record in of_kind(records, "draft_sampling")
    ]
    headers = ("rule", "filters", "graph", "graph, warm", "eager", "floor")
    return "\n".join(
        [
            "verify sampling, ms",
            table(("batch x K", *headers, "goal", "vLLM 0.25.1"), verifications),
            "",
            f"draft sampling, ms a token; coupled: with the {_NUM_OUTCOMES} best outcomes",
            table(("batch", *headers), drafts),
        ]
    )


def _times(record: Record) -> tuple[float | None, float | None, float, float]:
    return record["graph_ms"], record["graph_warm_ms"], record["eager_wall_ms"], record["floor_ms"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("sampling.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget-seconds", type=float, default=80.0, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary, for a CPU")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "sampling", device)
    deadline = time.monotonic() + options.budget_seconds

    def measure() -> int:
        with torch.inference_mode():
            SamplingBenchmark(TINY if options.tiny else FULL, device, recorder, deadline).run()
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return 0

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
