"""The drafters without a model: prompt lookup and scripts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from drafter_service.drafter import Draft, NoDraft
from drafter_service.ngram_drafter import NgramDrafter
from drafter_service.scripted_drafter import ScriptedDrafter, load_script
from drafter_service.sequence import DraftSequence
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import drafter_pb2


def sequence(token_ids: Sequence[int], max_draft_tokens: int = 4) -> DraftSequence:
    return DraftSequence(
        sequence_id=1,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParameters(),
        max_draft_tokens=max_draft_tokens,
        wants_candidates=True,
    )


def found(drafter: NgramDrafter, wanting: DraftSequence) -> list[int]:
    """The draft of one sequence, empty where nothing matches."""
    (answer,) = drafter.draft([wanting])
    if isinstance(answer, NoDraft):
        assert answer.reason == drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH
        return []
    assert answer.candidate_ids is None
    return list(answer.token_ids)


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
    assert found(NgramDrafter(min_ngram=2, max_ngram=3), sequence(token_ids)) == draft


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
    growing = [sequence([chance.randrange(5) for _ in range(chance.randint(1, 9))]) for _ in range(20)]
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
    one = sequence([1, 2, 1, 2])
    drafter.draft([one])
    drafter.release(one)
    assert not drafter._texts


def test_a_script_that_fails_costs_one_sequence_its_drafter() -> None:
    def script(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        if token_ids[0] == 1:
            raise RuntimeError("no idea")
        return range(max_draft_tokens + 3) if token_ids[0] == 2 else ()

    answers = ScriptedDrafter(script).draft([sequence([1]), sequence([2]), sequence([3])])
    failed, drafted, nothing = answers
    assert isinstance(failed, NoDraft)
    assert failed.reason == drafter_pb2.NO_PROPOSAL_REASON_INTERNAL
    assert "no idea" in failed.detail
    assert isinstance(drafted, Draft)
    assert list(drafted.token_ids) == [0, 1, 2, 3]
    assert isinstance(nothing, NoDraft)
    assert nothing.reason == drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH


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
