"""Time of the drafter's pass over nodes of trees, beside passes over as many causal tokens and over one token each.

    python -m benchmarks.tree_pass --pair DIR --out FILE

A pass is B sequences of W nodes behind `--context` tokens, in a CUDA graph, from token ids to logits, without choosing
or sampling anything. `attention` is attention of all layers alone, over random keys and values; for nodes with the
lists of what they see, which are made once a pass. `copies` are those of accepted nodes to their places in the blocks,
eight a sequence. Block tables are as wide as the model's longest context, as those of a service are. The logits of
chains are compared with those of the same tokens in causal order before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.forest import Forest
from benchmarks.pair import PairDirectory, add_pair_arguments, pair_of
from benchmarks.prefill import next_tokens, prefill
from benchmarks.records import Record, Recorder, RefusalError, of_kind, progress, remarks, run_refusable, table
from benchmarks.timing import copy_bandwidth, graph_milliseconds, resolve_device
from engine.attention import AttentionCall, CachedAttention, TreeAttention
from engine.batch import Batch, TreeBatch, build_batch
from engine.kv_cache import KVCache, LayerShape
from engine.model_runner import ModelRunner
from kernels.node_keys import collect_node_keys
from kernels.tree_attention import TreeKeys

_BLOCK_SIZE = 16
_COPIES_EACH = 8
# Older nodes of a tree, for each that a pass computes: what a drafter makes while the target verifies.
_OLDER_EACH = 3
# Largest relative error of a chain's logits against causal ones', as a norm: sums go in another order.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class TreePassBenchmark:
    """Everything that is timed of one drafter on one device."""

    def __init__(
        self,
        pair: PairDirectory,
        device: torch.device,
        recorder: Recorder,
        passes: Sequence[tuple[int, int]],  # (sequences, nodes of each)
        *,
        context: int,
        area_size: int,
        deadline: float,  # on time.monotonic's clock: nothing new is begun after it
    ) -> None:
        self._shape = pair.shape.drafter
        self._device = device
        self._recorder = recorder
        self._passes = passes
        self._context = context
        self._area_size = area_size
        self._deadline = deadline
        self._bandwidth = copy_bandwidth(device)
        recorder.write("bandwidth", bytes_per_second=self._bandwidth)
        recorder.write("pair", shape=pair.request.shape_name, agreement=pair.measured.agreement)
        self._most_sequences = max(batch for batch, _ in passes)
        progress("loading the drafter")
        self._runner = ModelRunner(
            pair.drafter,
            device=device,
            dtype=self._shape.dtype,
            block_size=_BLOCK_SIZE,
            num_blocks=self._most_sequences * self._blocks_each,
            num_reserved_slots=self._most_sequences * area_size,
        )

    def run(self) -> None:
        """Check, then time. Raises RefusalError, before anything is timed, when the check fails."""
        for batch, num_nodes in self._passes:
            self._check(batch, num_nodes)
        for batch, num_nodes in self._passes:
            what = f"{batch} x {num_nodes}"
            if time.monotonic() > self._deadline:
                self._recorder.write("left_out", what=what)
                continue
            causal, trees, num_seen = self._causal(batch, num_nodes), *self._trees(batch, num_nodes)
            fields = {"batch_size": batch, "num_nodes": num_nodes, "num_seen": num_seen}
            record = self._recorder.write(
                "tree_pass",
                **fields,
                single_ms=self._time_pass(self._causal(batch, 1)),
                causal_ms=self._time_pass(causal),
                tree_ms=self._time_pass(trees),
                floor_ms=self._shape.step_bytes(batch, self._context) / self._bandwidth * 1e3,
            )
            progress(f"pass {what}: {record['tree_ms']:.3f} ms, causal {record['causal_ms']:.3f}")
            record = self._recorder.write("tree_attention", **fields, **self._time_attention(causal, trees, num_seen))
            progress(f"attention {what}: {record['tree_ms']:.4f} ms, causal {record['causal_ms']:.4f}")
            record = self._recorder.write("copy_kv", batch_size=batch, **self._time_copies(trees))
            progress(f"{record['num_pairs']} copies: {record['copy_ms']:.4f} ms, none of them {record['idle_ms']:.4f}")

    @property
    def _blocks_each(self) -> int:
        return -(-(self._context + 64) // _BLOCK_SIZE)

    def _causal(self, batch: int, num_tokens: int) -> Batch:
        """So many tokens of each sequence one behind another, their contexts computed."""
        runner = self._runner
        slices = [
            next_tokens(block_ids, self._context, num_tokens, runner.vocab_size)
            for block_ids in prefill(runner, batch, self._context)
        ]
        causal = build_batch(slices, block_size=_BLOCK_SIZE, num_blocks=runner.num_blocks, device=self._device)
        max_blocks = -(-runner.max_length // _BLOCK_SIZE)
        block_tables = F.pad(causal.block_tables, (0, max_blocks - causal.block_tables.shape[1]))
        return replace(causal, block_tables=block_tables, logit_rows=None)

    def _trees(self, batch: int, num_nodes: int) -> tuple[TreeBatch, float]:
        """The last nodes of random trees, the others computed; how many nodes they see."""
        num_older = min(_OLDER_EACH * num_nodes, self._area_size - num_nodes)
        token_ids = np.random.default_rng(5).integers(self._runner.vocab_size, size=(batch, num_older + num_nodes))
        forest = Forest.grow(token_ids, context=self._context, area_size=self._area_size, reach=2 * num_nodes)
        cache = self._cache(batch)
        for first in range(0, num_older, num_nodes):
            self._runner.forward(forest.batch(first, min(first + num_nodes, num_older), **cache))
        return forest.batch(num_older, forest.num_nodes, **cache), forest.num_seen(num_older)

    def _cache(self, batch: int) -> dict[str, Any]:
        """Where trees have their keys and values."""
        return {
            "first_slot": self._runner.first_reserved_slot,
            "block_tables": self._causal(batch, 1).block_tables,
        }

    def _check(self, batch: int, num_nodes: int) -> None:
        """The same tokens in causal order and as chains of nodes."""
        causal = self._causal(batch, num_nodes)
        token_ids = causal.token_ids.view(batch, num_nodes).cpu().numpy()
        chains = Forest.grow(token_ids, context=self._context, area_size=self._area_size, reach=1)
        expected = self._runner.forward(causal).float()
        found = self._runner.forward(chains.batch(0, num_nodes, **self._cache(batch))).float()
        error = float((found - expected).norm() / expected.norm())
        # Written so that NaN fails.
        if not error <= _TOLERANCES[self._shape.dtype]:
            raise RefusalError(f"logits of nodes in chains are off by {error:.2e} from those of causal tokens")
        self._recorder.write("check", batch_size=batch, num_nodes=num_nodes, error=error)

    def _time_pass(self, batch: Batch | TreeBatch) -> float:
        return graph_milliseconds(lambda: self._runner.forward(batch), self._device)

    def _time_attention(self, causal: Batch, trees: TreeBatch, num_seen: float) -> dict[str, float]:
        shape, batch = self._shape, trees.prefix_lens.shape[0]
        cache = KVCache(
            [LayerShape(shape.num_kv_heads, shape.head_dim)] * shape.num_layers,
            num_blocks=self._runner.num_blocks,
            block_size=_BLOCK_SIZE,
            dtype=shape.dtype,
            device=self._device,
            num_reserved_slots=self._most_sequences * self._area_size,
        )
        for stack in cache.stacks:
            stack.normal_()
        query = torch.randn(trees.num_tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
        calls = [AttentionCall(layer, shape.head_dim**-0.5, None, None) for layer in range(shape.num_layers)]

        def attend_causally() -> None:
            attention = CachedAttention(
                cache.keys,
                cache.values,
                causal.slot_mapping,
                cu_query_lens=causal.cu_query_lens,
                context_lens=causal.context_lens,
                block_tables=causal.block_tables,
                max_query_len=causal.max_query_len,
            )
            for call in calls:
                attention.attend_stored(call, query)

        def attend_as_trees() -> None:
            attention = TreeAttention(
                cache.keys,
                cache.values,
                trees.slot_mapping,
                keys=TreeKeys(
                    trees.prefix_lens,
                    trees.block_tables,
                    collect_node_keys(trees.is_ancestor, trees.node_starts),
                    trees.positions,
                ),
            )
            for call in calls:
                attention.attend_stored(call, query)

        num_bytes = batch * (self._context + num_seen) * shape.kv_bytes_per_token
        return {
            "causal_ms": graph_milliseconds(attend_causally, self._device),
            "tree_ms": graph_milliseconds(attend_as_trees, self._device),
            "floor_ms": num_bytes / self._bandwidth * 1e3,
        }

    def _time_copies(self, trees: TreeBatch) -> dict[str, float]:
        """Of as many pairs as all sequences could accept, all of them real and none."""
        sources = (trees.node_starts.unsqueeze(1) + torch.arange(_COPIES_EACH, device=self._device)).flatten()
        destinations = torch.arange(sources.shape[0], device=self._device)
        nothing = torch.full_like(sources, -1)
        return {
            "num_pairs": sources.shape[0],
            "copy_ms": graph_milliseconds(lambda: self._runner.copy_kv(sources, destinations), self._device),
            "idle_ms": graph_milliseconds(lambda: self._runner.copy_kv(nothing, nothing), self._device),
        }


def summary(records: Sequence[Record]) -> str:
    """The tables of what was recorded."""

    def rows(kind: str, *names: str) -> list[tuple[object, ...]]:
        return [
            (
                f"{record['batch_size']} x {record['num_nodes']}",
                record["num_seen"],
                *(record[name] for name in names),
                record["tree_ms"] / record["causal_ms"],
            )
            for record in of_kind(records, kind)
        ]

    return "\n".join(
        [
            "pass, ms",
            table(
                ("batch x nodes", "nodes seen", "one token", "causal", "tree", "floor", "tree : causal"),
                rows("tree_pass", "single_ms", "causal_ms", "tree_ms", "floor_ms"),
            ),
            "",
            "attention of all layers, ms",
            table(
                ("batch x nodes", "nodes seen", "causal", "tree", "floor", "tree : causal"),
                rows("tree_attention", "causal_ms", "tree_ms", "floor_ms"),
            ),
            "",
            "copies of slots, ms",
            table(
                ("pairs", "all copied", "none"),
                [(str(r["num_pairs"]), r["copy_ms"], r["idle_ms"]) for r in of_kind(records, "copy_kv")],
            ),
        ]
    )


def _pass_shape(text: str) -> tuple[int, int]:
    batch, _, num_nodes = text.partition("x")
    return int(batch), int(num_nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("tree_pass.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--device", default="auto")
    shapes = [(1, 32), (8, 16), (32, 8), (64, 4)]
    parser.add_argument(
        "--passes", type=_pass_shape, nargs="+", default=shapes, help="BxW (default 1x32 8x16 32x8 64x4)"
    )
    parser.add_argument("--context", type=int, default=400, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--area-size", type=int, default=512, help="nodes of a sequence (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=60.0, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a tiny pair, for a CPU")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(shape="tiny", passes=[(1, 8), (3, 2)], context=64, area_size=50)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.budget_seconds
    device = resolve_device(options.device)
    recorder = Recorder(options.out, "tree_pass", device)

    def measure() -> int:
        benchmark = TreePassBenchmark(
            pair_of(options, device),
            device,
            recorder,
            options.passes,
            context=options.context,
            area_size=options.area_size,
            deadline=deadline,
        )
        benchmark.run()
        print(f"\n{summary(recorder.records)}{remarks(recorder.records)}", flush=True)
        return 0

    return run_refusable(recorder, measure)


if __name__ == "__main__":
    sys.exit(main())
