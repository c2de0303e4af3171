"""The model drafter's trees, told pass by pass, against plain forwarding of each path.

Without a GPU the same work runs unrecorded, which covers its layout and padding; on one (make gpu-test) it replays.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafter_service.frames import split_by_session
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.expansions import unpack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2, drafter_pb2
from tests.services.draft_sequences import chains_of, commit, draft_sequence
from tests.services.drafted_trees import VOCABULARY, Plain, ToldTree, drawn_from, loaded_drafter, take
from tests.tiny_models import save_tiny_llama

REJECTION, COUPLED, GREEDY = (
    common_pb2.VERIFICATION_REJECTION,
    common_pb2.VERIFICATION_COUPLED,
    common_pb2.VERIFICATION_GREEDY,
)
RULES: list[dict[str, Any]] = [
    {"verification": REJECTION, "sampling": SamplingParameters(seed=1)},
    {"verification": COUPLED, "sampling": SamplingParameters(seed=(1 << 64) - 3)},
    {"verification": GREEDY, "sampling": SamplingParameters(temperature=0.0)},
    {"verification": REJECTION, "sampling": SamplingParameters(temperature=1.3, top_k=9, seed=2)},
    {"verification": COUPLED, "sampling": SamplingParameters(temperature=0.8, top_p=0.7, min_p=0.02, seed=3)},
    {"verification": REJECTION, "sampling": SamplingParameters(temperature=0.0)},
]
PENALISED: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.9, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 0.6, "logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 0.8, "presence_penalty": 1.5, "top_p": 0.9, "seed": 6},
    {"temperature": 1.2, "frequency_penalty": 0.8, "logit_bias": {3: 2.0}, "top_k": 12, "seed": 7},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_length=128, scale=2.0)


MOST_OPEN = 7
# What was agreed with each verifier.
STREAMS = [
    DraftLimits(max_draft_tokens=4, max_candidates=num_candidates, num_children=num_children, max_expansions=64)
    for num_candidates, num_children in ((16, 3), (5, 1), (9, 2))
]


class Verifiers:
    """Sequences that come, are drafted for and go, with verdicts that follow their trees for a while or not."""

    def __init__(
        self,
        drafter: ModelDrafter,
        model: Path,
        seed: int,
        *,
        takes_turns: bool | None = None,  # None: some do
        rules: Sequence[dict[str, Any]] = RULES,
    ) -> None:
        self.drafter = drafter
        self.rng = random.Random(seed)
        self.plain = Plain(model)
        self.trees: dict[DraftSequence, ToldTree] = {}
        self.rules = rules
        self.takes_turns = takes_turns
        self.num_opened = 0
        self.seen: Counter[str] = Counter()
        self.waiting: set[DraftSequence] = set()  # those in turns whose last verdict is not answered

    def play(self, num_steps: int) -> None:
        """So many passes, with whatever happens in between."""
        for _ in range(num_steps):
            while len(self.trees) < MOST_OPEN and self.rng.random() < 0.5:
                self._open()
            for tree in list(self.trees.values()):
                if self.rng.random() < 0.02:
                    self._close(tree.sequence)
                elif self.rng.random() < 0.4:
                    self._commit(tree)
            if self.drafter.has_work:
                self._draft()
            else:
                self.seen["rest"] += 1

    def _open(self) -> None:
        turns = self.rng.random() < 0.5 if self.takes_turns is None else self.takes_turns
        self.num_opened += 1
        session_id = self.num_opened % len(STREAMS)
        limits = replace(STREAMS[session_id], takes_turns=turns)
        sequence = draft_sequence(
            self.rng.choices(range(VOCABULARY), k=self.rng.choice((1, 2, 20, 70))),
            sequence_id=self.num_opened,
            num_prompt_tokens=1,
            session_id=session_id,
            max_draft_tokens=self.rng.choice((1, 3, 4)),
            limits=limits,
            **self.rules[self.num_opened % len(self.rules)],
        )
        self.trees[sequence] = ToldTree(sequence)
        self.drafter.open(sequence)

    def _close(self, sequence: DraftSequence) -> None:
        self.drafter.release(sequence)
        self.trees.pop(sequence)
        self.waiting.discard(sequence)
        self.seen["closed"] += 1

    def _commit(self, tree: ToldTree) -> None:
        sequence = tree.sequence
        if sequence in self.waiting and self.rng.random() < 0.9:
            return
        by_path = {node.path: node for node in tree.nodes.values()}
        path = tuple(sequence.token_ids)
        for _ in range(self.rng.choice((1, 1, 2, 4, 6, 20))):
            children = by_path[path].child_ids if path in by_path else []
            if children and self.rng.random() < 0.8:
                token = children[0] if self.rng.random() < 0.7 else self.rng.choice(children)
            else:
                token = self.rng.randrange(VOCABULARY)
            path = (*path, token)
        self.seen["deep hit"] += path[:-1] in by_path
        if sequence.limits.takes_turns:
            self.waiting.add(sequence)
        commit(self.drafter, sequence, path[sequence.length :])

    def _draft(self) -> None:
        drafts = self.drafter.draft()
        take(drafts, self.trees)
        for expanded in drafts.expanded:
            for session_id, frame in split_by_session(expanded):
                limits = STREAMS[session_id]
                _, errors = unpack_expansions(frame, vocabulary_size=VOCABULARY, limits=limits)
                assert not errors
        for refusal in drafts.refusals:
            if refusal.reason == drafter_pb2.REFUSAL_REASON_NO_MATCH:
                assert refusal.sequence.limits.takes_turns
                self.waiting.discard(refusal.sequence)
                self.seen["nothing"] += 1
            else:
                assert refusal.reason == drafter_pb2.REFUSAL_REASON_MAX_LENGTH
                assert refusal.sequence.length >= self.drafter.max_length
                self._close(refusal.sequence)
                self.seen["outgrown"] += 1
        for tree in self.trees.values():
            self._check(tree)

    def _check(self, tree: ToldTree) -> None:
        sequence = tree.sequence
        if tree.new:
            self.waiting.discard(sequence)
        num_children = self.drafter.limits.num_children
        for node in tree.new:
            assert len(set(node.child_ids)) == num_children
            if sequence.wants_candidates:
                assert node.child_ids[0] == drawn_from(node, sequence.sampling.seed)
            if self.rng.random() < 0.6:
                continue  # forwarding each path takes most of the time
            expected = self.plain.sample(sequence, node, num_children)
            assert expected.outcome_ids is not None
            self.seen["expansions"] += 1
            if sequence.wants_candidates:
                # All of q; a product of another shape rounds otherwise.
                sent = {i: w for i, w in zip(node.candidate_ids, node.candidate_weights, strict=True) if w}
                ids, weights = expected.candidate_ids[0].tolist(), expected.candidate_weights[0].tolist()
                plain = {i: w for i, w in zip(ids, weights, strict=True) if w}
                assert all(abs(sent.get(i, 0) - plain.get(i, 0)) <= 8 for i in sent.keys() | plain.keys())
                assert len(sent) <= sequence.limits.max_candidates
                self.seen["q"] += bool(sent)
            self.seen["same"] += node.child_ids == expected.outcome_ids[0].tolist()
            assert all(0 <= p < 65536 for p in node.probabilities)
            assert sum(node.probabilities) <= 65536 + num_children


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"has_graphs": True}),
        (2, {"num_blocks": 16, "num_slots": 3}),
        (3, {"num_blocks": 16, "has_graphs": True, "num_passes": 2}),
        (4, {"takes_turns": True}),
        (5, {"takes_turns": True, "num_blocks": 16, "has_graphs": True}),
        (6, {"max_nodes": 64, "max_rows": 2, "has_graphs": True}),
        (7, {"min_probability": 0.05, "num_passes": 3}),
    ],
)
def test_each_expansion_is_what_its_path_gives(model: Path, seed: int, options: dict[str, Any]) -> None:
    """Catches a node that reads another branch's keys, keys kept of what was not accepted, or lost with a sequence that
    gave way, a tree taken for its slot's last one's, and first children drawn from another q than is sent."""
    drafter = loaded_drafter(model, **options)
    takes_turns = options.get("takes_turns") or None
    verifiers = Verifiers(drafter, model, seed, takes_turns=takes_turns)
    verifiers.play(200)
    seen = verifiers.seen
    assert seen["expansions"] > 60
    # But for what falls on the other side of a rounded weight.
    assert seen["same"] >= 0.98 * seen["expansions"]
    assert seen["q"] > 10
    assert seen["deep hit"] > 5
    assert seen["outgrown"] > 0


@pytest.mark.parametrize("options", [{"has_graphs": True}, {"num_blocks": 16, "max_penalized": 8}])
def test_penalties_count_what_is_committed(model: Path, options: dict[str, Any]) -> None:
    """Catches tables that lag behind verdicts, keep what was their last sequence's, or reach a neighbour."""
    rules: list[dict[str, Any]] = [
        {"verification": REJECTION if index % 2 else COUPLED, "sampling": SamplingParameters(**sampling)}
        for index, sampling in enumerate([*PENALISED, {"seed": 8}, *PENALISED[::-1]])
    ]
    drafter = loaded_drafter(model, **options)
    verifiers = Verifiers(drafter, model, 11, rules=rules)
    verifiers.play(150)
    assert verifiers.seen["expansions"] > 60
    assert verifiers.seen["same"] >= 0.98 * verifiers.seen["expansions"]
    assert verifiers.seen["q"] > 10


def turns(drafter: ModelDrafter, num_rounds: int, *, max_draft_tokens: int) -> list[list[list[int]]]:
    """What each sequence is drafted, round by round; verdicts do not depend on it."""
    rng = random.Random(4)
    sequences = [
        draft_sequence(
            [rng.randrange(VOCABULARY) for _ in range(5 + 7 * index)],
            sequence_id=index,
            max_draft_tokens=max_draft_tokens,
            **rule,
        )
        for index, rule in enumerate(RULES)
    ]
    found = []
    for sequence in sequences:
        drafter.open(sequence)
    while drafter.has_work:
        assert not drafter.draft().expanded  # before the first verdict nobody asks for drafts
    for _ in range(num_rounds):
        for sequence in sequences:
            commit(drafter, sequence, [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2)))])
        chains: dict[int, list[int]] = {}
        while drafter.has_work:
            for chain in chains_of(drafter.draft()):
                assert chain.num_committed == chain.sequence.length
                chains[chain.sequence.sequence_id] = chain.token_ids
        found.append([chains[sequence.sequence_id] for sequence in sequences])
    return found


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_turn_is_the_chain_that_single_tokens_make(model: Path, has_graphs: bool) -> None:
    """Catches a chain that follows other children than first ones, or stops at those that are unlikely."""
    together = turns(
        loaded_drafter(model, takes_turns=True, has_graphs=has_graphs, min_probability=0.5), 6, max_draft_tokens=4
    )
    # One by one: what was drafted is committed, which makes the next root.
    drafter = loaded_drafter(model, takes_turns=True)
    rng = random.Random(4)
    texts = [[rng.randrange(VOCABULARY) for _ in range(5 + 7 * index)] for index in range(len(RULES))]
    for chains in together:
        for text in texts:
            text += [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2)))]
        for rule, text, chain in zip(RULES, texts, chains, strict=True):
            sequence = draft_sequence(text[:-1], max_draft_tokens=1, **rule)
            drafter.open(sequence)
            token, single = text[-1], []
            for _ in range(4):
                commit(drafter, sequence, [token])
                answers = []
                while drafter.has_work:
                    answers.append(drafter.draft())
                (expanded,) = [part for drafts in answers for part in drafts.expanded]
                token = int(expanded.child_ids[0, 0])
                single.append(token)
            drafter.release(sequence)
            assert chain == single


def test_verifiers_may_ask_for_what_graphs_make(model: Path) -> None:
    """Catches a request for a chain that no graph makes."""
    assert loaded_drafter(model).limits.max_draft_tokens == MAX_DRAFT_TOKENS
    limits = loaded_drafter(model, has_graphs=True).limits
    assert limits == DraftLimits(max_draft_tokens=4, max_candidates=16, num_children=3, max_expansions=64)


def test_trees_stay_within_learnt_positions(tmp_path: Path) -> None:
    """Catches a pass that looks up positions which the model has not."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=20, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    drafter = loaded_drafter(tmp_path, has_graphs=True)
    ahead = DraftLimits(max_draft_tokens=4, max_candidates=16, num_children=3, max_expansions=64)
    sequence = draft_sequence(range(18), limits=ahead)
    trees = {sequence: ToldTree(sequence)}
    drafter.open(sequence)
    while drafter.has_work:
        take(drafter.draft(), trees)
    # The root and its children's expansions; what follows them stands at the last position.
    assert Counter(len(node.path) for node in trees[sequence].nodes.values()) == {18: 1, 19: 3}
    commit(drafter, sequence, [1, 2])
    assert [refusal.reason for refusal in drafter.draft().refusals] == [drafter_pb2.REFUSAL_REASON_MAX_LENGTH]


def test_a_prompt_does_not_hold_up_those_that_draft(model: Path) -> None:
    """Catches a prompt that is computed before others' verdicts are answered, and one that never is."""
    drafter = loaded_drafter(model, takes_turns=True)
    old, new = draft_sequence([1, 2, 3]), draft_sequence([index % VOCABULARY for index in range(120)], sequence_id=2)
    drafter.open(old)
    drafter.draft()
    drafter.open(new)
    commit(drafter, old, [4])
    drafts = drafter.draft()
    assert [expanded.sequences for expanded in drafts.expanded] == [[old]]
    assert drafts.computing == [new]
    while drafter.has_work:
        drafter.draft()
    assert new.num_computed == 120


def test_more_sequences_than_a_replay_holds_are_served_in_turn(model: Path) -> None:
    """Catches a verifier of few sequences that waits behind one of many."""
    drafter = loaded_drafter(model, max_rows=2)
    ahead = DraftLimits(max_draft_tokens=4, max_candidates=16, num_children=3, max_expansions=64)
    sequences = [
        draft_sequence([1, index], sequence_id=index, session_id=min(index, 1), limits=ahead) for index in range(7)
    ]
    for sequence in sequences:
        drafter.open(sequence)
    served: Counter[int] = Counter()
    for _ in range(8):  # until the tree of the one is as large as it may be
        for expanded in drafter.draft().expanded:
            served.update(sequence.session_id for sequence in expanded.sequences)
    assert served[0] >= 6
    assert abs(served[0] - served[1]) <= 2
