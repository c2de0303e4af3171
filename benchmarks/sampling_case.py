"""Inputs of the sampling stage that look like serving: logits of a target and of a drafter that mostly agree."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from kernels.draft_sample import DraftSample, draft_sample
from kernels.limits import WEIGHT_TOTAL
from kernels.rejection_sample import RejectionSample, rejection_sample

REJECTION, COUPLED = "rejection", "coupled"
# A base that is compared with may be older than coupling.
HAS_COUPLING = "is_coupled" in inspect.signature(rejection_sample).parameters

# Of normal logits: an entropy of about 3 nats and an agreement of about 0.8 at a vocabulary of 128,256.
_DEVIATION = 5.3
_CORRELATION = 0.994


class FilterTensors(TypedDict):
    """As the kernels take them."""

    top_k: torch.Tensor | None  # [batch] int32
    top_p: torch.Tensor | None  # [batch] float32


class Coupling(TypedDict, total=False):
    """As the kernels take it; nothing where no sequence is coupled, as older ones do not know it."""

    is_coupled: torch.Tensor  # [batch] int32


@dataclass(frozen=True)
class Filters:
    """Which filters a case uses."""

    top_k: int | None = None
    top_p: float | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return "none" if self.top_k is None else f"top-k {self.top_k}, top-p {self.top_p:g}"

    def tensors(self, batch_size: int, device: torch.device) -> FilterTensors:
        """The same for each sequence of a batch."""
        top_k, top_p = self.top_k, self.top_p
        return {
            "top_k": None if top_k is None else torch.full((batch_size,), top_k, dtype=torch.int32, device=device),
            "top_p": None if top_p is None else torch.full((batch_size,), top_p, device=device),
        }


@dataclass(frozen=True)
class SamplingCase:
    """One call of `rejection_sample` at temperature 1, with drafts that `draft_sample` drew."""

    target_logits: torch.Tensor  # [num_rows, vocab_size] bfloat16
    cu_num_draft_tokens: torch.Tensor  # [batch + 1] int32
    draft_logits: torch.Tensor  # [total_draft, vocab_size] bfloat16
    draft: DraftSample  # of all draft tokens
    temperature: torch.Tensor  # [batch] float32
    seeds: torch.Tensor  # [batch] int64
    positions: torch.Tensor  # [batch] int64
    max_num_draft_tokens: int
    coupling: Coupling
    filters: FilterTensors

    @classmethod
    def build(
        cls,
        num_draft_tokens: list[int],  # of each sequence
        vocab_size: int,
        filters: Filters,
        device: torch.device,
        *,
        seed: int,
        rule: str = REJECTION,
    ) -> SamplingCase:
        """Random logits and drafts from them."""
        generator = torch.Generator(device).manual_seed(seed)
        batch_size, total = len(num_draft_tokens), sum(num_draft_tokens)
        counts = torch.tensor(num_draft_tokens, device=device)

        def normal(num_rows: int) -> torch.Tensor:
            return torch.randn(num_rows, vocab_size, generator=generator, device=device)

        target = normal(total + batch_size)
        sequences = torch.repeat_interleave(torch.arange(batch_size, device=device), counts)
        draft_rows = torch.arange(total, device=device) + sequences
        drafter = _CORRELATION * target[draft_rows] + math.sqrt(1 - _CORRELATION**2) * normal(total)
        draft_logits = (_DEVIATION * drafter).bfloat16()
        seeds = torch.randint(1 << 62, (batch_size,), generator=generator, device=device)
        positions = torch.randint(1, 4096, (batch_size,), generator=generator, device=device)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), counts.cumsum(0)])
        steps = torch.arange(total, device=device) - starts[:-1][sequences]
        draft = draft_sample(
            draft_logits,
            torch.ones(total, device=device),
            seeds[sequences],
            positions[sequences] + steps,
            **filters.tensors(total, device),
            **_coupling(rule, total, device),
        )
        return cls(
            (_DEVIATION * target).bfloat16(),
            starts.int(),
            draft_logits,
            draft,
            torch.ones(batch_size, device=device),
            seeds,
            positions,
            max(num_draft_tokens),
            _coupling(rule, batch_size, device),
            filters.tensors(batch_size, device),
        )

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self.temperature)

    @property
    def logit_bytes(self) -> int:
        """Bytes of the target's logits: what has to be read once."""
        return self.target_logits.nbytes

    def sample(self) -> RejectionSample:
        """Run the stage."""
        return rejection_sample(
            self.target_logits,
            self.cu_num_draft_tokens,
            self.draft.token_ids,
            self.draft.candidate_ids,
            self.draft.candidate_weights,
            self.temperature,
            self.seeds,
            self.positions,
            max_num_draft_tokens=self.max_num_draft_tokens,
            **self.filters,
            **self.coupling,
        )

    def on_cpu(self) -> SamplingCase:
        """The same on the CPU, where the kernels' plain-torch references run."""
        draft = self.draft
        tensors = ("target_logits", "cu_num_draft_tokens", "draft_logits", "temperature", "seeds", "positions")
        return replace(
            self,
            **{name: getattr(self, name).cpu() for name in tensors},
            draft=DraftSample(draft.token_ids.cpu(), draft.candidate_ids.cpu(), draft.candidate_weights.cpu()),
            coupling=_coupling(COUPLED if self.coupling else REJECTION, self.batch_size, torch.device("cpu")),
            filters={"top_k": _on_cpu(self.filters["top_k"]), "top_p": _on_cpu(self.filters["top_p"])},
        )

    def first_acceptance(self) -> float:
        """The probability that a sequence's first draft token is accepted, without filters: a mean over sequences.

        Rejection: sum(min(p, q)). Coupling: the sum over tokens x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)),
        as the smallest E / p and the smallest E / q meet in x; of the inner sums, those y count by p that p likes no
        less than x, in proportion to q, the others by q.
        """
        rows = (self.cu_num_draft_tokens[:-1] + torch.arange(self.batch_size, device=self.seeds.device)).long()
        first_drafts = self.cu_num_draft_tokens[:-1].long()
        p = self.target_logits[rows].double().softmax(-1)
        if not self.coupling:
            weights = self.draft.candidate_weights[first_drafts].double() / WEIGHT_TOTAL
            candidate_p = p.gather(1, self.draft.candidate_ids[first_drafts].long())
            return float(torch.minimum(candidate_p, weights).sum(dim=1).mean())
        q = self.draft_logits[first_drafts].double().softmax(-1)
        order = (p / q).argsort(dim=1, descending=True)
        p, q = p.gather(1, order), q.gather(1, order)
        return float((1 / (p.cumsum(dim=1) / p + (1 - q.cumsum(dim=1)) / q)).sum(dim=1).mean())


def _coupling(rule: str, batch_size: int, device: torch.device) -> Coupling:
    return {"is_coupled": torch.ones(batch_size, dtype=torch.int32, device=device)} if rule == COUPLED else {}


def _on_cpu(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.cpu()
