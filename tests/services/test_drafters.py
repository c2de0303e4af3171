"""The drafters without a model: prompt lookup and scripts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafter_service.drafter import Drafter
from drafter_service.fairness import take_turns
from drafter_service.ngram_drafter import NgramDrafter
from drafter_service.scripted_drafter import ScriptedDrafter, load_script
from drafter_service.sequence import DraftSequence
from outrider.protocol.handshake import DraftLimits
from outrider.v1 import drafter_pb2
from tests.services.draft_sequences import AHEAD, LIMITS, chains_of, commit, draft_sequence


def found(drafter: NgramDrafter, sequence: DraftSequence) -> list[int]:
    """What is drafted behind all that is committed, empty where nothing matches."""
    drafter.commit(sequence, [])
    drafts = drafter.draft()
    assert not drafter.has_work
    if drafts.refusals:
        ((refusal),) = drafts.refusals
        assert (refusal.sequence, refusal.reason) == (sequence, drafter_pb2.REFUSAL_REASON_NO_MATCH)
        assert not drafts.expanded
        return []
    (chain,) = chains_of(drafts)
    assert chain.candidate_ids is None
    assert chain.num_committed == sequence.length
    return chain.token_ids


def opened(drafter: Drafter, token_ids: Sequence[int], **fields: Any) -> DraftSequence:
    """A sequence that the drafter knows."""
    sequence = draft_sequence(token_ids, **fields)
    drafter.open(sequence)
    return sequence


@pytest.mark.parametrize(
    ("token_ids", "draft"),
    [
        ([1, 2, 3, 9, 9, 1, 2], [3, 9, 9, 1]),
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], [5, 6, 1, 2]),  # the latest place
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # the longest n-gram, although it is further back
        ([1, 2, 3, 4], []),
        ([5], []),
        ([5, 5], []),
        ([5, 5, 5], [5]),
        ([0, 1, 0, 1, 0, 1], [0, 1]),
    ],
)
def test_prompt_lookup(token_ids: list[int], draft: list[int]) -> None:
    drafter = NgramDrafter(min_ngram=2, max_ngram=3)
    assert found(drafter, opened(drafter, token_ids)) == draft


def test_prompt_lookup_equals_a_plain_search_while_the_text_grows() -> None:
    """Catches an index that is off after the text has grown, and one that does not fit its sequence."""
    chance = random.Random(1)

    def plain(tokens: list[int], sizes: Sequence[int]) -> list[int]:
        for size in sizes:
            for end in range(len(tokens) - 1, size - 1, -1):
                if tokens[end - size : end] == tokens[-size:]:
                    return tokens[end : end + 4]
        return []

    drafter = NgramDrafter(min_ngram=1, max_ngram=4)
    growing = [opened(drafter, chance.choices(range(5), k=chance.randint(1, 9))) for _ in range(20)]
    num_found = 0
    for _ in range(50):
        one = chance.choice(growing)
        draft = found(drafter, one)
        assert draft == plain(one.token_ids, (4, 3, 2, 1))
        num_found += bool(draft)
        one.token_ids += [chance.randrange(5) for _ in range(chance.randint(1, 5))]
    assert num_found > 30


def test_prompt_lookup_forgets_what_is_released() -> None:
    drafter = NgramDrafter()
    one = opened(drafter, [1, 2, 1, 2], limits=AHEAD)
    drafter.draft()
    commit(drafter, one, [1])
    drafter.release(one)
    assert not drafter.has_work
    assert not drafter._texts
    assert not drafter._next_ids


def test_a_script_that_fails_costs_one_sequence_its_drafter() -> None:
    def script(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        if token_ids[0] == 1:
            raise RuntimeError("no idea")
        return {2: range(max_draft_tokens + 3), 3: (), 4: (7, -1), 5: (2**31,)}[token_ids[0]]

    drafter = ScriptedDrafter(script)
    sequences = [opened(drafter, [number], limits=AHEAD) for number in (1, 2, 3, 4, 5)]
    drafts = drafter.draft()
    refused = {refusal.sequence: refusal for refusal in drafts.refusals}
    internal, no_match = drafter_pb2.REFUSAL_REASON_INTERNAL, drafter_pb2.REFUSAL_REASON_NO_MATCH
    assert [refused[sequences[index]].reason for index in (0, 2, 3, 4)] == [internal, no_match, internal, internal]
    assert "no idea" in refused[sequences[0]].detail
    (chain,) = chains_of(drafts)
    assert (chain.sequence, chain.token_ids) == (sequences[1], [0, 1, 2, 3])


def test_chains_of_several_sequences_in_one_pass() -> None:
    """Catches an expansion whose parent is another sequence's, and an id that is used twice."""
    drafter = ScriptedDrafter(lambda token_ids, most: list(range(token_ids[-1], token_ids[-1] + token_ids[0])))
    sequences = [opened(drafter, [number], sequence_id=number) for number in (1, 3, 2)]
    next_ids = dict.fromkeys(sequences, 0)
    chance = random.Random(3)
    for _ in range(20):
        wanting = chance.sample(sequences, chance.randint(1, 3))
        for sequence in wanting:
            commit(drafter, sequence, chance.choices(range(50), k=chance.randint(1, 3)))
        found = list(chains_of(drafter.draft()))
        assert [chain.sequence for chain in found] == wanting
        for chain in found:
            sequence, last = chain.sequence, chain.sequence.token_ids[-1]
            assert chain.token_ids == list(range(last, last + sequence.sequence_id))
            assert (chain.first_id, chain.num_committed) == (next_ids[sequence], sequence.length)
            next_ids[sequence] += sequence.sequence_id


@pytest.mark.parametrize("limits", [LIMITS, AHEAD], ids=["turns", "ahead"])
def test_who_wants_an_answer(limits: DraftLimits) -> None:
    """In turns nothing is drafted before the first verdict; several verdicts are answered at once."""
    drafter = ScriptedDrafter(lambda token_ids, most: [7])
    sequence = opened(drafter, [1, 2], limits=limits)
    assert drafter.has_work is not limits.takes_turns
    assert [chain.num_committed for chain in chains_of(drafter.draft())] == ([] if limits.takes_turns else [2])
    assert not drafter.has_work
    for token_id in (3, 4):
        commit(drafter, sequence, [token_id])
    assert [chain.num_committed for chain in chains_of(drafter.draft())] == [4]
    assert not drafter.has_work


def test_verifiers_take_turns() -> None:
    """Catches a verifier of many sequences before which another's never comes."""
    sessions = [1, 1, 1, 1, 2, 3, 3]
    sequences = [draft_sequence([1], sequence_id=n, session_id=session) for n, session in enumerate(sessions)]
    assert [sequence.sequence_id for sequence in take_turns(sequences)] == [0, 4, 5, 1, 6, 2, 3]
    assert take_turns(sequences[:3]) == sequences[:3]
    assert take_turns([]) == []


def test_a_file_of_sequences_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"sequences": [[1, 2, 3], [1, 2, 4, 5, 6]]}))
    script = load_script(str(path))
    assert list(script([1], 1)) == [2]
    assert list(script([1, 2, 4], 9)) == [5, 6]
    assert list(script([1, 2, 3], 9)) == []
    assert list(script([2], 9)) == []


def test_a_callable_is_imported() -> None:
    found: object = load_script("operator:getitem")([5, 6, 7], 1)
    assert found == 6


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nowhere.json", "cannot read"),
        ("nowhere:script", "cannot import"),
        ("json:nothing_of_that_name", "cannot import"),
        ("json:__name__", "is not callable"),
    ],
)
def test_a_script_that_is_not_there(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"script: .*{problem}"):
        load_script(source)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        "{}",
        '{"sequences": 1}',
        '{"sequences": [1]}',
        '{"sequences": [["a"]]}',
        '{"sequences": [[-1]]}',
        '{"sequences": [], "more": 1}',
    ],
)
def test_a_file_that_holds_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="script: "):
        load_script(str(path))
