"""`outrider demo`: one prompt with and without speculation, greedy and sampled, and a table of what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from outrider import origins
from outrider.bundled import heldout_prompt
from outrider.client import AsyncClient, Chunk, Completion
from outrider.completion import CompletionBuilder
from outrider.local import LocalCluster, Options, StartError
from outrider.progress import ClusterProgress

_SEED = 2026
# Speeds are medians over these: one slow moment of the machine shall not decide.
_REPETITIONS = 3


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str
    temperature: float
    speculation: bool


RUNS = (
    Run("greedy", 0.0, speculation=True),
    Run("greedy", 0.0, speculation=False),
    Run("sampled", 1.0, speculation=True),
    Run("sampled", 1.0, speculation=False),
)


def run_demo(options: Options, prompt: str | None, max_tokens: int, console: Console) -> int:
    """Run everything; the exit status.

    1 when a service fails, when nothing was drafted, and when outputs with and without speculation differ on a CPU: in
    float32 nothing excuses that, while bfloat16 on a GPU may round a near tie differently in a batch of another shape.
    """
    errors = Console(stderr=True)
    try:
        return asyncio.run(_demo(options, prompt or heldout_prompt(), max_tokens, console, errors))
    except (StartError, FileNotFoundError) as error:
        errors.print(f"outrider: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


async def _demo(options: Options, prompt: str, max_tokens: int, console: Console, errors: Console) -> int:
    with ClusterProgress(errors) as progress:
        async with LocalCluster(options, progress.report) as cluster, AsyncClient(cluster.address) as client:
            # The first requests of a process pay for what later ones find ready.
            for run in RUNS:
                await _generate(client, run, prompt, max_tokens=8)
            console.print(
                "\nA prompt that no model was trained on, and how the pair continues it, greedily:\n", style="bold"
            )
            console.print(prompt, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
            shown = await _generate(client, RUNS[0], prompt, max_tokens, console)
            console.print("\n")
            console.print(origins.legend(shown.tokens))
            # Taking turns, so that a slow minute of the machine hits all of them.
            rounds = [[await _generate(client, run, prompt, max_tokens) for run in RUNS] for _ in range(_REPETITIONS)]
            is_exact = cluster.devices.verifier == "cpu"
    return report(list(zip(*rounds, strict=True)), is_exact=is_exact, console=console)


async def _generate(
    client: AsyncClient, run: Run, prompt: str, max_tokens: int, console: Console | None = None
) -> Completion:
    builder = CompletionBuilder()
    async for event in client.stream(
        prompt,
        max_tokens=max_tokens,
        temperature=run.temperature,
        # Coupled where it is sampled: then its output does not depend on speculation either.
        seed=_SEED,
        ignore_eos=True,
        speculation=run.speculation,
        token_texts=console is not None,
    ):
        builder.add(event)
        if console is not None and isinstance(event, Chunk):
            origins.write(console, event)
    return builder.build()


def report(results: Sequence[Sequence[Completion]], *, is_exact: bool, console: Console) -> int:
    """Print the table and what follows from it; the exit status.

    `results` holds the repetitions of each of RUNS; `is_exact` says that the target ran in float32.
    """
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption=f"sampled: temperature 1, seed {_SEED}, coupled verification"
    )
    table.add_column("decoding")
    table.add_column("drafter")
    for header in ("tokens/s", "accepted", "tokens/step", "steps", "first token"):
        table.add_column(header, justify="right")
    for run, repetitions in zip(RUNS, results, strict=True):
        completion = repetitions[0]
        rate = completion.speculation.acceptance_rate
        first_token = median(item.timings.time_to_first_token_seconds for item in repetitions)
        table.add_row(
            run.name,
            "on" if run.speculation else "off",
            f"{_tokens_per_second(repetitions):.1f}",
            "" if rate is None else f"{rate:.0%}",
            f"{completion.mean_acceptance_length:.2f}",
            str(completion.speculation.num_steps),
            f"{first_token * 1e3:.0f} ms",
        )
    console.print(table)
    for run, drafted, plain in zip(RUNS[::2], results[::2], results[1::2], strict=True):
        if _tokens_per_second(plain) > 0:
            ratio = _tokens_per_second(drafted) / _tokens_per_second(plain)
            console.print(f"{run.name}: {ratio:.2f} times the speed of the target alone", highlight=False)
    has_differences = False
    for run, drafted, plain in zip(RUNS[::2], results[::2], results[1::2], strict=True):
        difference = _first_difference(drafted[0].token_ids, plain[0].token_ids)
        has_differences |= difference is not None
        same = f"yes, all {len(plain[0].token_ids)} tokens" if difference is None else f"no, from token {difference} on"
        console.print(f"same {run.name} output with and without speculation: {same}", highlight=False)
    if not any(completion.speculation.num_draft_tokens for completion in results[0]):
        console.print("Nothing was drafted: this run says nothing about speculation.", style="red")
        return 1
    return 1 if is_exact and has_differences else 0


def _tokens_per_second(repetitions: Sequence[Completion]) -> float:
    return median(completion.tokens_per_second or 0.0 for completion in repetitions)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
