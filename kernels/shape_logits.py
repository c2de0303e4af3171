"""Shapes raw logits into the distribution to sample from: penalties and bias, temperature, top-k, top-p, min-p.

The filters run in the order of Hugging Face transformers and are all expressed as one logit a row: tokens at or above
it keep a probability in proportion to exp(logit / temperature), the rest have none. Ties at the edge are all kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.arguments import check_logits, check_shaping, check_tensor
from kernels.dispatch import runs_triton
from kernels.integer_weights import exponential_weights, row_chunks, sanitized
from kernels.penalties import Penalties


@dataclass(frozen=True)
class PenalizedLogits:
    """Logits of which the penalised rows are replaced; the others are not copied."""

    logits: torch.Tensor  # [num_rows, vocab_size]: the raw logits
    replacements: torch.Tensor | None  # [num_replaced, vocab_size] float32
    replacement_rows: torch.Tensor | None  # [num_rows] int32: row of `replacements`, or -1 for a raw row

    def dense(self, rows: slice | torch.Tensor) -> torch.Tensor:  # [n, vocab_size] float32
        """A float32 copy of some rows, NaN and infinities made harmless: what the references work on."""
        logits = sanitized(self.logits[rows])
        if self.replacements is not None and self.replacement_rows is not None:
            sources = self.replacement_rows[rows]
            replaced = torch.nonzero(sources >= 0).squeeze(1)
            logits[replaced] = sanitized(self.replacements[sources[replaced].long()])
        return logits


def apply_penalties(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, bfloat16 or float16
    penalties: Penalties | None,
    draft_token_ids: torch.Tensor,  # [total_draft] int32
) -> PenalizedLogits:
    """Penalise float32 copies of the rows concerned, with the output counted up to the row's own position.

    In this order: a logit whose token is in the prompt, the output or the draft tokens before the row is divided by the
    repetition penalty when positive, else multiplied; the frequency penalty is subtracted once for each time that the
    token stands in the output or those draft tokens, the presence penalty once if it stands there at all; the bias is
    added. Token ids outside the vocabulary are skipped. Raises ValueError when the shapes or types do not fit.
    """
    check_logits("logits", logits)
    check_tensor("draft_token_ids", draft_token_ids, (None,), (torch.int32,), logits.device)
    if penalties is None:
        return PenalizedLogits(logits, None, None)
    if penalties.replacement_rows.shape[0] > logits.shape[0]:
        raise ValueError(f"penalties are for {penalties.replacement_rows.shape[0]} rows, logits has {logits.shape[0]}")
    replacements = logits.index_select(0, penalties.rows).float()
    if runs_triton(logits):
        from kernels.shape_logits_triton import launch_penalties

        launch_penalties(replacements, penalties, draft_token_ids)
    else:
        _penalize(replacements, penalties, draft_token_ids)
    return PenalizedLogits(logits, replacements, penalties.replacement_rows)


def logit_thresholds(
    logits: torch.Tensor | PenalizedLogits,  # [num_rows, vocab_size]
    temperature: torch.Tensor,  # [batch] float32; 0: greedy, no filter applies
    top_k: torch.Tensor | None,  # [batch] int32; 0 or None: off
    top_p: torch.Tensor | None,  # [batch] float32; 1 or None: off
    min_p: torch.Tensor | None,  # [batch] float32; 0 or None: off
    row_sequences: torch.Tensor | None = None,  # [num_rows] int32; None: row i belongs to sequence i
) -> torch.Tensor | None:  # [num_rows] float32
    """The smallest logit that each row keeps, -inf for a row without filters; None, at no cost, if no filter is given.

    Top-p counts the distribution that top-k leaves. Raises ValueError when the shapes or types do not fit.
    """
    rows = logits if isinstance(logits, PenalizedLogits) else PenalizedLogits(logits, None, None)
    num_rows, device = rows.logits.shape[0], rows.logits.device
    check_logits("logits", rows.logits)
    check_shaping(temperature.shape[0], device, temperature, top_k, top_p, min_p)
    if row_sequences is not None:
        check_tensor("row_sequences", row_sequences, (num_rows,), (torch.int32,), device)
    elif temperature.shape[0] != num_rows:
        raise ValueError(f"temperature has {temperature.shape[0]} entries for {num_rows} rows and no row_sequences")
    if top_k is None and top_p is None and min_p is None:
        return None
    if row_sequences is not None:
        temperature = temperature[row_sequences]
        top_k, top_p, min_p = (None if values is None else values[row_sequences] for values in (top_k, top_p, min_p))
    if runs_triton(rows.logits):
        from kernels.thresholds_triton import thresholds_of_rows

        return thresholds_of_rows(rows, temperature, (top_k, top_p, min_p))
    parameters = (
        temperature,
        torch.zeros(num_rows, dtype=torch.int32) if top_k is None else top_k,
        torch.ones(num_rows) if top_p is None else top_p,
        torch.zeros(num_rows) if min_p is None else min_p,
    )
    thresholds = torch.empty(num_rows)
    for chunk in row_chunks(num_rows, rows.logits.shape[1]):
        thresholds[chunk] = reference_thresholds(rows.dense(chunk), *(parameter[chunk] for parameter in parameters))
    return thresholds


def reference_thresholds(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, sanitized
    temperatures: torch.Tensor,  # [num_rows] float32
    top_k: torch.Tensor,  # [num_rows] int32
    top_p: torch.Tensor,  # [num_rows] float32
    min_p: torch.Tensor,  # [num_rows] float32
) -> torch.Tensor:  # [num_rows] float32
    """`logit_thresholds` in plain torch, with the parameters expanded to rows."""
    vocab_size = logits.shape[1]
    is_random = temperatures > 0
    has_top_k = is_random & (top_k > 0) & (top_k < vocab_size)
    has_top_p = is_random & (top_p < 1)
    has_min_p = is_random & (min_p > 0)
    thresholds = torch.full_like(temperatures, -torch.inf)
    if has_min_p.any():
        smallest = logits.amax(dim=1) + temperatures * min_p.log()
        thresholds = torch.where(has_min_p, smallest, thresholds)
    rows = torch.nonzero(has_top_k | has_top_p).squeeze(1)
    if rows.numel():
        sorted_limits = _sorted_thresholds(
            logits if rows.numel() == logits.shape[0] else logits[rows],
            temperatures[rows],
            torch.where(has_top_k, top_k, 0)[rows],
            torch.where(has_top_p, top_p, 1.0)[rows],
        )
        thresholds[rows] = torch.maximum(thresholds[rows], sorted_limits)
    return thresholds


def _sorted_thresholds(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32
    temperatures: torch.Tensor,  # [num_rows] float32
    top_k: torch.Tensor,  # [num_rows] int32; 0: off
    top_p: torch.Tensor,  # [num_rows] float32; 1: off
) -> torch.Tensor:  # [num_rows] float32
    """Thresholds of top-k and top-p by sorting what can lie above them."""
    maxima = logits.amax(dim=1)
    only_top_p = top_k == 0
    # Rows with top-k pay for this sum too unless there are no others: picking rows out would copy them.
    totals = torch.zeros(len(maxima), dtype=torch.float64)
    if only_top_p.any():
        totals = exponential_weights(logits, maxima, temperatures).double().sum(dim=1)
    bounds = _lower_bounds(logits, maxima, temperatures, top_k, top_p, totals)
    values = _sorted_above(logits, bounds)
    weights = exponential_weights(values, maxima, temperatures).double()

    kth = values.gather(1, (top_k.long() - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    limits = torch.where(only_top_p, -torch.inf, kth)
    weights.mul_(values >= limits.unsqueeze(1))
    totals = torch.where(only_top_p, totals, weights.sum(dim=1))
    needed = (top_p.double() * totals).clamp_min_(1.0)
    last = (weights.cumsum(dim=1) < needed.unsqueeze(1)).sum(dim=1).clamp_max_(values.shape[1] - 1)
    nucleus = values.gather(1, last.unsqueeze(1)).squeeze(1)
    return torch.where(top_p < 1, torch.maximum(limits, nucleus), limits)


def _lower_bounds(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32
    maxima: torch.Tensor,  # [num_rows] float32
    temperatures: torch.Tensor,  # [num_rows] float32
    top_k: torch.Tensor,  # [num_rows] int32; 0: off
    top_p: torch.Tensor,  # [num_rows] float32; 1: off
    totals: torch.Tensor,  # [num_rows] float64: the weight of rows without top-k
) -> torch.Tensor:  # [num_rows] float32
    """A cheap lower bound of each row's threshold. Sorting everything would take most of the time of a step."""
    num_rows, vocab_size = logits.shape
    # The tokens below the bound weigh less than 1 - top_p together, so the nucleus is above it. The 0.01 is slack for
    # rounding.
    shares = (1 - top_p.double()) * totals / (vocab_size * 2.0**40)
    bounds = (maxima.double() + temperatures.double() * (shares.log() - 0.01)).float()
    largest_k = int(top_k.max())
    if largest_k:
        num_groups = 1 << (4 * largest_k - 1).bit_length()
        kth = torch.full_like(maxima, -torch.inf)
        if 2 * num_groups <= vocab_size:
            # The k largest group maxima are k tokens, so the k-th of them is no larger than the k-th largest token.
            groups = logits[:, : vocab_size // num_groups * num_groups].view(num_rows, -1, num_groups).amax(dim=1)
            kth = _sort_descending(groups).gather(1, (top_k.long() - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        bounds = torch.where(top_k > 0, kth, bounds)
    return torch.where(bounds.isnan(), -torch.inf, bounds)


def _sorted_above(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32
    bounds: torch.Tensor,  # [num_rows] float32
) -> torch.Tensor:  # [num_rows, width] float32
    """Each row's logits at or above its bound in descending order, padded with -inf."""
    num_rows, vocab_size = logits.shape
    places = np.flatnonzero((logits >= bounds.unsqueeze(1)).numpy())
    rows = places // vocab_size
    counts = np.bincount(rows, minlength=num_rows)
    width = max(int(counts.max()), 1)
    if 2 * width > vocab_size:
        return _sort_descending(logits)
    starts = counts.cumsum() - counts
    values = np.full((num_rows, width), -np.inf, dtype=np.float32)
    values[rows, np.arange(len(places)) - starts[rows]] = logits.contiguous().view(-1).numpy()[places]
    return _sort_descending(torch.from_numpy(values))


def _sort_descending(values: torch.Tensor) -> torch.Tensor:
    """Sorted copies of the rows. numpy sorts float32 with vector instructions, five times faster than torch."""
    return torch.from_numpy(-np.sort(-values.numpy(), axis=1))


def _penalize(
    replacements: torch.Tensor,  # [n, vocab_size] float32, changed in place
    penalties: Penalties,
    draft_token_ids: torch.Tensor,  # [total_draft] int32
) -> None:
    row_sequences = penalties.row_sequences.long()
    num_entries = penalties.cu_entries.diff().long()[row_sequences]
    # One element for each entry in each row of its sequence.
    rows = torch.arange(len(row_sequences)).repeat_interleave(num_entries)
    sequences = row_sequences[rows]
    places = torch.arange(len(rows)) - (num_entries.cumsum(dim=0) - num_entries)[rows]
    entries = penalties.cu_entries[sequences] + places
    is_valid = (penalties.token_ids[entries] >= 0) & (penalties.token_ids[entries] < replacements.shape[1])
    rows, sequences, entries = rows[is_valid], sequences[is_valid], entries[is_valid]
    token_ids = penalties.token_ids[entries].long()

    counts = penalties.output_counts[entries]
    row_steps, draft_starts = penalties.row_steps[rows], penalties.draft_starts[sequences]
    for step in range(int(penalties.row_steps.max())):
        drafted = draft_token_ids[(draft_starts + step).clamp_max_(len(draft_token_ids) - 1)]
        counts += (row_steps > step) & (drafted == token_ids)

    logits = replacements[rows, token_ids]
    repetition = penalties.repetition_penalties[sequences]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((counts > 0) | penalties.in_prompt[entries], repeated, logits)
    logits -= penalties.frequency_penalties[sequences] * counts
    logits -= penalties.presence_penalties[sequences] * (counts > 0)
    replacements[rows, token_ids] = logits + penalties.biases[entries]
