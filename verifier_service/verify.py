"""One step: the target's forward pass over [last committed token, proposals...] of every sequence, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import SequenceSlice
from engine.draft_tokens import DraftRows, DraftTokens, concatenate
from engine.sampling_tensors import SamplingTensors, penalized
from kernels.logprobs import token_logprobs
from kernels.penalties import Penalties
from kernels.rejection_sample import rejection_sample
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, verifier_pb2
from verifier_service.decode_graph import DecodeGraphs, GraphRun
from verifier_service.decoding import TargetLimits, parse_opening
from verifier_service.scheduler import Scheduled
from verifier_service.target import Target


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Verified:
    """What a step commits to one sequence: the accepted draft tokens and one token of the target's own."""

    token_ids: list[int]
    num_accepted: int
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()  # one each, or none at all


class Launched:
    """A step that the device works on, or will when it has done what came before."""

    def __init__(self, run: GraphRun) -> None:
        self._run = run

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        return self._run.is_done

    def collect(self) -> Sequence[Verified | None]:
        """What `verify` would have returned. Waits for the device."""
        return _verified(self._run.collect())


def launch(target: Target, batch: Sequence[Scheduled]) -> Launched | None:
    """Begin a step without waiting for it; None, and nothing done, where it has parts that no graph holds.

    At most `MAX_STEPS_IN_FLIGHT` steps may be begun and not collected. A sequence that is part of both has no drafts in
    the first, and the second's part is chained.
    """
    if target.graphs is None:
        return None
    drafts = []
    for part in batch:
        drafts.append(draft := part.sequence.speculation.peek(part.num_drafts))
        if not _fits(target.graphs, part, draft):
            return None
    is_chained = [part.is_chained for part in batch]
    return Launched(target.graphs.launch([part.sequence for part in batch], drafts, is_chained))


def verify(target: Target, batch: Sequence[Scheduled]) -> list[Verified | None]:
    """Run a step. The answer has an entry for each part of the batch, None for inner chunks of prompts."""
    drafts = [part.sequence.speculation.peek(part.num_drafts) for part in batch]
    results: list[Verified | None] = [None] * len(batch)
    # Decoding replays a graph; chunks of prompts and what else has no graph follow in a pass of their own, which is
    # launched while the device works on the graph.
    graphs, graphed = target.graphs, []
    if graphs is not None:
        graphed = [index for index, part in enumerate(batch) if _fits(graphs, part, drafts[index])]
    eager = sorted(set(range(len(batch))).difference(graphed))
    run: GraphRun | None = None
    if graphs is not None and graphed:
        run = graphs.launch(
            [batch[index].sequence for index in graphed],
            [drafts[index] for index in graphed],
            [batch[index].is_chained for index in graphed],
        )
    if eager:
        try:
            verified = _verify_eagerly(target, [batch[index] for index in eager], [drafts[index] for index in eager])
        except Exception:
            if run is not None:
                run.collect()  # what it was filled from is used again
            raise
        for index, result in zip(eager, verified, strict=True):
            results[index] = result
    if run is not None:
        for index, graph_result in zip(graphed, _verified(run.collect()), strict=True):
            results[index] = graph_result
    return results


def warm_up(target: Target) -> None:
    """Sample once in each way that has kernels of its own and no graph: with penalties."""
    if target.graphs is None:
        return
    limits = TargetLimits(target.vocabulary_size, 2, frozenset(), target.graphs.max_draft_tokens)
    logits = target.runner.execute([SequenceSlice([0], 0, [0], 1)])
    for top_p, num_drafts in product((1.0, 0.5), (0, target.graphs.max_draft_tokens)):
        opening = verifier_pb2.OpenDecoding(
            token_ids=pack_tokens([0]),
            num_prompt_tokens=1,
            sampling=common_pb2.SamplingParameters(temperature=1.0, top_p=top_p, presence_penalty=1.0, seed=0),
        )
        sequence = parse_opening(opening, limits=limits, session_id=0, link_sequence_id=0, drafter=None, arrived_ns=0)
        none = np.empty((num_drafts, 0), np.int32)
        draft = DraftTokens([0] * num_drafts, DraftRows(np.zeros(num_drafts, np.int32), none, none))
        _sample(target, logits.repeat(num_drafts + 1, 1), [Scheduled(sequence, 1, num_drafts, True)], [draft])


def _fits(graphs: DecodeGraphs, part: Scheduled, draft: DraftTokens) -> bool:
    """Whether a graph can decode the part."""
    return part.is_sampled and part.num_new == 1 and graphs.fits(part.sequence, draft)


def _verify_eagerly(target: Target, batch: Sequence[Scheduled], drafts: Sequence[DraftTokens]) -> list[Verified | None]:
    logits = target.runner.execute([_slice(part, draft) for part, draft in zip(batch, drafts, strict=True)])
    sampled = [(part, draft) for part, draft in zip(batch, drafts, strict=True) if part.is_sampled]
    if not sampled:
        return [None] * len(batch)
    results = iter(_sample(target, logits, [part for part, _ in sampled], [draft for _, draft in sampled]))
    return [next(results) if part.is_sampled else None for part in batch]


def _slice(part: Scheduled, draft: DraftTokens) -> SequenceSlice:
    sequence = part.sequence
    start = sequence.num_computed
    return SequenceSlice(
        token_ids=[*sequence.token_ids[start : start + part.num_new], *draft.token_ids],
        start=start,
        block_ids=sequence.block_ids,
        # The last committed token's row decides the first draft token's position, a draft token's row the one behind.
        num_logit_rows=1 + part.num_drafts if part.is_sampled else 0,
    )


def _sample(
    target: Target,
    logits: torch.Tensor,  # [num_rows, vocab_size]
    parts: Sequence[Scheduled],
    drafts: Sequence[DraftTokens],
) -> list[Verified]:
    sequences = [part.sequence for part in parts]
    tensors = SamplingTensors.build(
        [sequence.sampling for sequence in sequences],
        positions=[sequence.length for sequence in sequences],
        vocabulary_size=target.vocabulary_size,
        device=target.device,
    )
    # In a graph's shapes where there are graphs: others would be other kernels, which the first of them waits for.
    most, min_candidates = max(part.num_drafts for part in parts), 0
    if (graphs := target.graphs) is not None:
        min_candidates = graphs.num_candidates
        if 0 < most < graphs.max_draft_tokens:
            most = graphs.max_draft_tokens
    all_drafts = concatenate(drafts, min_candidates=min_candidates)
    draft_token_ids = all_drafts.token_ids
    cu_num_drafts = np.cumsum([0, *(part.num_drafts for part in parts)], dtype=np.int32)

    def put(array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(target.device, non_blocking=True)

    sample = rejection_sample(
        logits,
        put(cu_num_drafts),
        put(draft_token_ids),
        put(all_drafts.candidate_ids),
        put(all_drafts.candidate_weights),
        tensors.temperature,
        tensors.seeds,
        tensors.positions,
        max_num_draft_tokens=most,
        top_k=tensors.top_k,
        top_p=tensors.top_p,
        min_p=tensors.min_p,
        penalties=Penalties.build(
            [
                penalized(index, sequence.sampling, sequence.history)
                for index, sequence in enumerate(sequences)
                if sequence.history is not None
            ],
            cu_num_drafts,
            draft_token_ids,
            target.device,
        ),
    )
    # The one wait for the device in a step: both results in one copy.
    results = _verified(torch.cat([sample.num_accepted.unsqueeze(1), sample.token_ids], dim=1).tolist())
    first_rows = cu_num_drafts[:-1] + np.arange(len(parts))
    for part, verified, first_row in zip(parts, results, first_rows.tolist(), strict=True):
        verified.logprobs = _logprobs(logits[first_row:], verified.token_ids, part.sequence.num_logprobs)
    return results


def _verified(rows: Sequence[list[int]]) -> list[Verified]:
    """What a step found, each sequence's number of accepted draft tokens in front of its tokens and of a rest."""
    return [Verified(row[1 : row[0] + 2], row[0]) for row in rows]


def _logprobs(
    logits: torch.Tensor,  # [num_rows, vocab_size], from the sequence's first row on
    token_ids: list[int],
    num_logprobs: int | None,
) -> Sequence[common_pb2.PositionLogprobs]:
    if num_logprobs is None:
        return ()
    found = token_logprobs(logits[: len(token_ids)], torch.tensor(token_ids, device=logits.device), num_logprobs)
    rows = zip(token_ids, found.chosen.tolist(), found.top_token_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    return [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob),
            top=[
                common_pb2.TokenLogprob(token_id=top_id, logprob=top_logprob)
                for top_id, top_logprob in zip(top_ids, top_logprobs, strict=True)
            ],
        )
        for token_id, logprob, top_ids, top_logprobs in rows
    ]
