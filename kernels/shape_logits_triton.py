"""Triton kernel of the penalties of `kernels.shape_logits`; the thresholds are in thresholds_triton.py."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.penalties import Penalties


@triton.jit
def _penalties_kernel(
    replacements_ptr,  # [n, vocab_size] float32, changed in place
    row_sequences_ptr,  # [n] int32
    row_steps_ptr,  # [n] int32
    draft_starts_ptr,  # [s] int32
    draft_token_ids_ptr,  # [total_draft] int32
    cu_entries_ptr,  # [s + 1] int32
    token_ids_ptr,  # [e] int32
    in_prompt_ptr,  # [e] bool
    output_counts_ptr,  # [e] int32
    biases_ptr,  # [e] float32
    repetition_penalties_ptr,  # [s] float32
    presence_penalties_ptr,  # [s] float32
    frequency_penalties_ptr,  # [s] float32
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences_ptr + row)
    entries = tl.load(cu_entries_ptr + sequence) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entries < tl.load(cu_entries_ptr + sequence + 1)
    token_ids = tl.load(token_ids_ptr + entries, mask=mask, other=-1)
    mask = mask & (token_ids >= 0) & (token_ids < vocab_size)
    counts = tl.load(output_counts_ptr + entries, mask=mask, other=0)
    draft_start = tl.load(draft_starts_ptr + sequence)
    for step in range(tl.load(row_steps_ptr + row)):
        counts += (token_ids == tl.load(draft_token_ids_ptr + draft_start + step)).to(tl.int32)

    logits = tl.load(replacements_ptr + row * vocab_size + token_ids, mask=mask, other=0.0)
    in_prompt = tl.load(in_prompt_ptr + entries, mask=mask, other=0) != 0
    repetition = tl.load(repetition_penalties_ptr + sequence)
    repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where((counts > 0) | in_prompt, repeated, logits)
    logits -= tl.load(frequency_penalties_ptr + sequence) * counts.to(tl.float32)
    logits -= tl.where(counts > 0, tl.load(presence_penalties_ptr + sequence), 0.0)
    logits += tl.load(biases_ptr + entries, mask=mask, other=0.0)
    tl.store(replacements_ptr + row * vocab_size + token_ids, logits, mask=mask)


def launch_penalties(
    replacements: torch.Tensor,  # [n, vocab_size] float32, changed in place
    penalties: Penalties,
    draft_token_ids: torch.Tensor,  # [total_draft] int32
) -> None:
    """`apply_penalties` on the GPU, on rows that are already copied."""
    num_rows, vocab_size = replacements.shape
    block = 256
    if num_rows and penalties.max_entries:
        _penalties_kernel[(num_rows, triton.cdiv(penalties.max_entries, block))](
            replacements,
            penalties.row_sequences,
            penalties.row_steps,
            penalties.draft_starts,
            draft_token_ids.contiguous(),
            penalties.cu_entries,
            penalties.token_ids,
            penalties.in_prompt,
            penalties.output_counts,
            penalties.biases,
            penalties.repetition_penalties,
            penalties.presence_penalties,
            penalties.frequency_penalties,
            vocab_size,
            BLOCK=block,
        )
