"""Triton kernels of `kernels.shape_logits`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.integer_weights_triton import exponential_weights, load_logits
from kernels.penalties import Penalties

if TYPE_CHECKING:
    from kernels.shape_logits import PenalizedLogits

# Leading bits in which two logits of a type can differ once they are float32; the rest follow from the sign.
_KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}


@triton.jit
def _ordered_key(values):
    """uint32 keys in the order of the float32 values."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value_of_key(key):
    """The float32 value of an ordered key."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_threshold(
    needed,  # float64
    floor,  # float32: smaller logits do not count
    maximum,
    temperature,
    row,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    vocab_size,
    BY_COUNT: tl.constexpr,
    KEY_BITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit such that the logits from it on are at least `needed`, by their number or by their weight.

    The logit's key is found digit by digit from the top, with one pass over the row for each digit.
    """
    NUM_DIGITS: tl.constexpr = KEY_BITS // DIGIT_BITS
    digits = tl.arange(0, 2**DIGIT_BITS).to(tl.uint32)
    key = (digits * 0).max(axis=0)
    for place in range(NUM_DIGITS):
        pivots = key | (digits << (32 - DIGIT_BITS - place * DIGIT_BITS))
        sums = tl.zeros([2**DIGIT_BITS], dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = load_logits(
                row, columns, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
            )
            if BY_COUNT:
                amounts = (values >= floor).to(tl.int64)
            else:
                amounts = tl.where(values >= floor, exponential_weights(values, maximum, temperature), 0)
            is_above = _ordered_key(values)[:, None] >= pivots[None, :]
            sums += tl.sum(tl.where(is_above, amounts[:, None], 0), axis=0)
        # Sums fall from one pivot to the next, and the first pivot's is enough.
        digit = tl.maximum(tl.sum((sums.to(tl.float64) >= needed).to(tl.int32), axis=0) - 1, 0)
        key = key | (digit.to(tl.uint32) << (32 - DIGIT_BITS - place * DIGIT_BITS))
    if KEY_BITS < 32:
        # A negative number's key is the complement of its bits, so its trailing zeros are ones.
        key = tl.where(key >= 0x80000000, key, key | ((1 << (32 - KEY_BITS)) - 1))
    return _value_of_key(key)


@triton.jit
def _thresholds_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    row_sequences_ptr,  # [num_rows] int32, or None
    temperature_ptr,  # [batch] float32
    top_k_ptr,  # [batch] int32, or None
    top_p_ptr,  # [batch] float32, or None
    min_p_ptr,  # [batch] float32, or None
    thresholds_ptr,  # [num_rows] float32
    vocab_size,
    KEY_BITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row
    if row_sequences_ptr is not None:
        sequence = tl.load(row_sequences_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + sequence)
    top_k = vocab_size
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + sequence)
    top_p = 1.0
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + sequence)
    min_p = 0.0
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + sequence)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = top_p < 1.0
    has_min_p = min_p > 0.0
    threshold = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0.0) & (has_top_k | has_top_p | has_min_p):
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = load_logits(
                row, columns, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
            )
            maxima = tl.maximum(maxima, values)
        maximum = tl.max(maxima, axis=0)
        if has_top_k:
            threshold = _largest_threshold(
                top_k.to(tl.float64),
                threshold,
                maximum,
                temperature,
                row,
                logits_ptr,
                logits_stride,
                replacements_ptr,
                replacement_rows_ptr,
                vocab_size,
                True,
                KEY_BITS,
                DIGIT_BITS,
                BLOCK,
            )
        if has_top_p:
            sums = tl.zeros([BLOCK], dtype=tl.int64)
            for start in range(0, vocab_size, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                values = load_logits(
                    row, columns, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
                )
                sums += tl.where(values >= threshold, exponential_weights(values, maximum, temperature), 0)
            total = tl.sum(sums, axis=0).to(tl.float64)
            nucleus = _largest_threshold(
                tl.maximum(total * top_p, 1.0),
                threshold,
                maximum,
                temperature,
                row,
                logits_ptr,
                logits_stride,
                replacements_ptr,
                replacement_rows_ptr,
                vocab_size,
                False,
                KEY_BITS,
                DIGIT_BITS,
                BLOCK,
            )
            threshold = tl.maximum(threshold, nucleus)
        if has_min_p:
            threshold = tl.maximum(threshold, maximum + temperature * tl.log(min_p))
    tl.store(thresholds_ptr + row, threshold)


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


def launch_thresholds(
    rows: PenalizedLogits,
    temperature: torch.Tensor,  # [batch] float32
    top_k: torch.Tensor | None,  # [batch] int32
    top_p: torch.Tensor | None,  # [batch] float32
    min_p: torch.Tensor | None,  # [batch] float32
    row_sequences: torch.Tensor | None,  # [num_rows] int32
) -> torch.Tensor:  # [num_rows] float32
    """`logit_thresholds` on the GPU: one program a row, rows without filters end at once."""
    num_rows, vocab_size = rows.logits.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=rows.logits.device)
    if num_rows:
        _thresholds_kernel[(num_rows,)](
            rows.logits,
            rows.logits.stride(0),
            rows.replacements,
            rows.replacement_rows,
            row_sequences,
            temperature.contiguous(),
            *(None if values is None else values.contiguous() for values in (top_k, top_p, min_p)),
            thresholds,
            vocab_size,
            KEY_BITS=_KEY_BITS[rows.logits.dtype] if rows.replacements is None else 32,
            DIGIT_BITS=2,
            BLOCK=min(triton.next_power_of_2(vocab_size), 2048),
            num_warps=8,
        )
    return thresholds


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
