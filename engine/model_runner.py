"""The model runner: packs a step, forwards it over the paged KV cache, returns the logits that were asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.attention import CachedAttention, TreeAttention
from engine.batch import Batch, SequenceSlice, TreeBatch, build_batch
from engine.fusion import fuse
from engine.kv_cache import KVCache, bytes_per_block, check_block_size, num_blocks_within, num_reserved_blocks
from engine.model_loader import load_model
from kernels.copy_kv import copy_kv
from kernels.dispatch import runs_triton_on
from kernels.node_keys import collect_node_keys

_logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ModelRunner:
    """Owns a model and its KV cache on one device. Not thread-safe: one thread runs all steps.

    The caller owns the blocks: it hands them out, keeps two sequences from sharing one, and truncates a sequence by
    starting its next slice earlier, which overwrites what was there.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int = 16,
        num_blocks: int | None = None,  # None: as many as fit
        num_reserved_slots: int = 0,  # of the KV cache, beside the blocks: for nodes of trees
        memory_fraction: float = 0.9,  # of what is free on a GPU after loading, for the KV cache; unless num_blocks
        cpu_cache_bytes: int = 512 << 20,  # for the KV cache on a CPU; unless num_blocks
        max_num_batched_tokens: int = 2048,
        max_length: int | None = None,  # None: what the model's config allows
        is_fused: bool | None = None,  # None: on a GPU, where launches and memory traffic decide
    ) -> None:
        """Load the model and allocate its cache.

        A GPU becomes the calling thread's current device, which is where Triton launches. Raises ModelLoadError for a
        model that cannot be served, MemoryError where the cache has no room, ValueError for a setting out of range.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype}")
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be positive, not {max_num_batched_tokens}")
        check_block_size(block_size)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            torch.cuda.set_device(device)
        loaded = load_model(model_path, device=device, dtype=dtype, max_length=max_length)
        if device.type == "cuda" if is_fused is None else is_fused:
            _logger.info("%s", fuse(loaded.model))
        if num_blocks is None:
            budget = _free_bytes(device, memory_fraction) if device.type == "cuda" else cpu_cache_bytes
            num_blocks = num_blocks_within(
                budget, loaded.layers, block_size, dtype, num_reserved_slots=num_reserved_slots
            )
        self._model = loaded.model
        self._keeps_chosen_logits = loaded.keeps_chosen_logits
        self._cache = KVCache(
            loaded.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            num_reserved_slots=num_reserved_slots,
        )
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.first_reserved_slot = self._cache.first_reserved_slot
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = loaded.vocab_size
        self._first_masked_id = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        # A sequence that the whole cache cannot hold would wait for blocks for ever.
        self.max_length = min(loaded.max_length, num_blocks * block_size)
        if self.max_length < loaded.max_length:
            _logger.warning(
                "the KV cache holds %d tokens: no sequence can be longer, though the model allows %d",
                self.max_length,
                loaded.max_length,
            )
        num_all_blocks = num_blocks + num_reserved_blocks(num_reserved_slots, block_size)
        _logger.info(
            "KV cache: %d blocks of %d tokens and %d reserved tokens, %d bytes",
            num_blocks,
            block_size,
            num_reserved_slots,
            num_all_blocks * bytes_per_block(loaded.layers, block_size, dtype),
        )

    @torch.inference_mode()
    def execute(
        self, slices: Sequence[SequenceSlice], complete: Callable[[Batch], None] | None = None
    ) -> torch.Tensor:  # [sum of num_logit_rows, vocab_size]
        """Compute the slices' tokens, keep their keys and values, and return the logits asked for.

        `complete` may put into the batch what only the device knows, before it is computed.
        The logits are on the device, in the model's dtype, in the order of the slices and their tokens; on a GPU they
        may still be under way. Raises ValueError, before anything is computed, for slices that break a limit.
        """
        self._check_limits(slices)
        batch = build_batch(slices, block_size=self.block_size, num_blocks=self.num_blocks, device=self.device)
        if complete is not None:
            complete(batch)
        return self.forward(batch)

    @torch.inference_mode()
    def forward(self, batch: Batch | TreeBatch) -> torch.Tensor:  # [num_logit_rows, vocab_size]
        """`execute` for a batch that is on the device already, unchecked; on a GPU it may be captured in a graph.

        To fill a batch up to a fixed shape, put tokens with slot -1 behind the others, which are computed and kept
        nowhere, and sequences with neither tokens nor context, which are skipped.
        """
        attention = self._attention(batch)
        rows = batch.logit_rows
        chosen = {"logits_to_keep": rows} if self._keeps_chosen_logits and rows is not None else {}
        logits: torch.Tensor = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            paged=attention,
            **chosen,
        ).logits[0]
        logits = logits if self._keeps_chosen_logits or rows is None else logits[rows]
        if self._first_masked_id < self.vocab_size:
            # Here and not at the output layer, behind which some models bend their logits.
            logits[:, self._first_masked_id :] = -torch.inf
        return logits

    def _attention(self, batch: Batch | TreeBatch) -> CachedAttention | TreeAttention:
        if isinstance(batch, Batch):
            return CachedAttention(
                key_caches=self._cache.keys,
                value_caches=self._cache.values,
                slot_mapping=batch.slot_mapping,
                cu_query_lens=batch.cu_query_lens,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                max_query_len=batch.max_query_len,
            )
        return TreeAttention(
            key_caches=self._cache.keys,
            value_caches=self._cache.values,
            slot_mapping=batch.slot_mapping,
            prefix_lens=batch.prefix_lens,
            block_tables=batch.block_tables,
            node_keys=collect_node_keys(batch.is_ancestor, batch.node_starts, batch.node_positions),
            positions=batch.positions,
        )

    @torch.inference_mode()
    def copy_kv(
        self,
        sources: torch.Tensor,  # [num_pairs] int64, cache slots; -1 for a pair that copies nothing
        destinations: torch.Tensor,  # [num_pairs] int64, as sources
    ) -> None:
        """Copy keys and values of all layers from slot to slot, as `kernels.copy_kv` does; it may be captured."""
        for stack in self._cache.stacks:
            copy_kv(stack, sources, destinations)

    def mask_ids_from(self, first_id: int) -> None:
        """Give token ids from this one on no probability: for the rows by which a vocabulary is padded.

        Call it before anything is captured in a graph. An id that is not below the vocabulary's size masks nothing.
        """
        self._first_masked_id = first_id

    def warm_up(self) -> None:
        """Run the shapes that a service meets, so that the first request does not wait for compilers.

        Overwrites the cache: call it before the first sequence.
        """
        longest = min(self.max_num_batched_tokens, self.max_length)
        if runs_triton_on(self.device):
            # Kernels are compiled for each power of two of the query length, up to tiles that are full.
            query_lens = {*(1 << power for power in range(longest.bit_length())), longest}
        else:
            query_lens = {1, min(8, longest)}  # nothing to compile, only memory to touch
        for query_len in sorted(query_lens):
            self._warm_up_with(1, query_len, query_len)
            for num_sequences, context_len in self._attention_batches(query_len):
                self._warm_up_with(num_sequences, query_len, context_len)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _attention_batches(self, query_len: int) -> set[tuple[int, int]]:
        """(number of sequences, context length) of what attention has a variant for."""
        if not runs_triton_on(self.device):
            return set()
        from kernels.paged_attention_split_triton import distinct_batches

        # Beside the longest the others may have a single token each.
        most_sequences = self.max_num_batched_tokens - query_len + 1
        most_context = -(-self.max_length // self.block_size) * self.block_size
        heads = {cache.shape[2:] for cache in self._cache.keys}
        return {
            batch
            for num_kv_heads, head_dim in heads
            for batch in distinct_batches(
                query_len,
                num_kv_heads,
                head_dim,
                self.dtype,
                block_size=self.block_size,
                most_sequences=most_sequences,
                most_context=most_context,
            )
        }

    def _warm_up_with(self, num_sequences: int, query_len: int, context_len: int) -> None:
        # One as long as that and the others as short as can be, all in the same blocks: what is computed means nothing.
        context_len = min(context_len, self.max_length)
        block_ids = range(-(-context_len // self.block_size))
        longest = SequenceSlice([0] * query_len, context_len - query_len, block_ids, 1)
        shortest = SequenceSlice([0], context_len - 1, block_ids, 1)
        self.execute([longest, *[shortest] * (num_sequences - 1)])

    def _check_limits(self, slices: Sequence[SequenceSlice]) -> None:
        num_tokens = sum(len(part.token_ids) for part in slices)
        if num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens exceeds max_num_batched_tokens={self.max_num_batched_tokens}"
            )
        for index, part in enumerate(slices):
            if part.start + len(part.token_ids) > self.max_length:
                raise ValueError(
                    f"slice {index} ends at position {part.start + len(part.token_ids) - 1}, and max_length is "
                    f"{self.max_length}"
                )
            # On a GPU an id out of range ends the process's CUDA context, not just this call.
            if min(part.token_ids, default=0) < 0 or max(part.token_ids, default=0) >= self.vocab_size:
                raise ValueError(f"slice {index} has a token id outside 0..{self.vocab_size - 1}")


def _free_bytes(device: torch.device, fraction: float) -> int:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"memory_fraction must be above 0 and at most 1, not {fraction}")
    torch.cuda.empty_cache()  # what loading left in torch's pool counts as taken otherwise
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * fraction)
