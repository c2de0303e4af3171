"""Expansions as they come off the wire: which are refused, and whose speculation it costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.expansions import ROOT, Expansions, pack_expansions, unpack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import MAX_CANDIDATES
from outrider.v1 import drafter_pb2

VOCABULARY = 100
LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=MAX_CANDIDATES, num_children=3, max_expansions=64)


def three_sequences(num_children: int = 2, num_candidates: int = 0) -> Expansions:
    """Lawful expansions of sequences 7, 8 and 9, two each: a root and a child, or children of older ones."""
    child_ids = np.arange(6 * num_children, dtype=np.int32).reshape(6, num_children)
    candidate_ids = (child_ids[:, :1] + np.arange(num_candidates, dtype=np.int32)).astype(np.int32)
    weights = np.full((6, num_candidates), 16, np.uint16)
    if num_candidates > 1:
        weights[:, 0] = 65536 - 16 * (num_candidates - 1)
    return Expansions(
        np.array([7, 8, 9], np.uint64),
        np.array([4, 5, 2**40]),
        np.array([2, 2, 2]),
        np.array([0, 10, 2**31 - 3]),
        np.array([ROOT, 0, 3, 3, ROOT, 2**31 - 3], np.int32),
        np.array([0, 1, 0, 1, 0, 0], np.uint8),
        child_ids,
        np.full(child_ids.shape, 9, np.uint16),
        candidate_ids,
        weights,
    )


def sent(
    expansions: Expansions, limits: DraftLimits = LIMITS
) -> tuple[Expansions, dict[int, tuple[str, InvalidArgumentError]]]:
    """What arrives, and what is wrong by sequence id."""
    message = drafter_pb2.Expansions.FromString(pack_expansions(expansions).SerializeToString())
    found, errors = unpack_expansions(message, vocabulary_size=VOCABULARY, limits=limits)
    return found, {int(found.sequence_ids[index]): (error.field, error) for index, error in errors.items()}


@pytest.mark.parametrize("num_children", [1, 3])
@pytest.mark.parametrize("num_candidates", [0, 2, 5])
def test_they_come_back_as_they_were(num_children: int, num_candidates: int) -> None:
    expansions = three_sequences(num_children, num_candidates)
    found, errors = sent(expansions)
    assert errors == {}
    for name in Expansions.__slots__:
        np.testing.assert_array_equal(getattr(found, name), getattr(expansions, name))
    assert found.ids.tolist() == [0, 1, 10, 11, 2**31 - 3, 2**31 - 2]


def test_a_frame_of_nothing() -> None:
    found, errors = unpack_expansions(drafter_pb2.Expansions(), vocabulary_size=VOCABULARY, limits=LIMITS)
    assert len(found.sequence_ids) == len(found.parents) == len(found.ids) == 0
    assert errors == {}


def change(name: str, where: object, value: object) -> Callable[[Expansions], None]:
    """Write into an array."""

    def apply(expansions: Expansions) -> None:
        getattr(expansions, name)[where] = value

    return apply


# Of sequence 8, whose expansions are the third and the fourth.
BAD: dict[str, tuple[Callable[[Expansions], None], str]] = {
    "an unborn parent": (change("parents", 2, 10), "parents"),
    "a child of its own": (change("parents", 3, 11), "parents"),
    "a parent from the future": (change("parents", 2, 2**31 - 1), "parents"),
    "no parent that there could be": (change("parents", 2, -2), "parents"),
    "a rank beyond the children": (change("ranks", 2, 3), "ranks"),
    "a root that is a second child": (change("parents", 3, ROOT), "ranks"),
    "a child beyond the vocabulary": (change("child_ids", (2, 1), VOCABULARY), "child_ids"),
    "a child of 32 bits": (change("child_ids", (2, 0), -1), "child_ids"),
    "a child that stands twice": (change("child_ids", (3, slice(None)), 7), "child_ids"),
    "nothing committed": (change("num_committed", 1, 0), "num_committed"),
    "more committed than can be": (change("num_committed", 1, -1), "num_committed"),
    "an id too large": (change("first_ids", 1, 2**31 - 1), "first_ids"),
    "an id far too large": (change("first_ids", 1, 2**32 - 1), "first_ids"),
    "a q that is too little": (change("candidate_weights", (2, 1), 15), "candidate_weights"),
    "a q that is too much": (change("candidate_weights", (2, 1), 17), "candidate_weights"),
    "a candidate beyond the vocabulary": (change("candidate_ids", (3, 2), VOCABULARY), "candidate_ids"),
    "a candidate of 32 bits": (change("candidate_ids", (3, 2), -1), "candidate_ids"),
    "a candidate that stands twice": (change("candidate_ids", (3, 2), 7), "candidate_ids"),
    "a first child without weight": (change("candidate_ids", (2, 0), 50), "candidate_weights"),
    "a first child of weight zero": (
        lambda expansions: (
            change("candidate_weights", (2, 0), 0)(expansions),
            change("candidate_weights", (2, 1), 65520)(expansions),
        )[0],
        "candidate_weights",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_would_make_verification_wrong_is_refused(name: str) -> None:
    """Catches a q that is no distribution: the target's output would be biased without anybody noticing.

    It costs nobody else anything.
    """
    spoil, field = BAD[name]
    expansions = three_sequences(2, 3)
    spoil(expansions)
    _, errors = sent(expansions)
    assert {sequence_id: found for sequence_id, (found, _) in errors.items()} == {8: field}


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in BAD for other in BAD if name != other])
def test_two_bad_ones_do_not_hide_each_other(name: str, other: str) -> None:
    """Catches a check that is left out because another one found something: both are named, and only they."""
    first, second = three_sequences(2, 3), three_sequences(2, 3)
    BAD[name][0](first)
    BAD[other][0](second)
    mixed = three_sequences(2, 3)
    # Sequence 8 of both, one as the first and one as the last of three.
    for place, source in ((0, first), (2, second)):
        for column in ("num_committed", "num_expansions", "first_ids"):
            getattr(mixed, column)[place] = getattr(source, column)[1]
        for column in ("parents", "ranks", "child_ids", "probabilities", "candidate_ids", "candidate_weights"):
            getattr(mixed, column)[2 * place : 2 * place + 2] = getattr(source, column)[2:4]
    _, errors = sent(mixed)
    assert {sequence_id: found for sequence_id, (found, _) in errors.items()} == {7: BAD[name][1], 9: BAD[other][1]}


@pytest.mark.parametrize("counts", [[0, 2, 4], [2, 0, 4], [6, 0, 0], [0, 0, 6], [1, 5, 0]])
def test_a_sequence_without_expansions_is_refused_and_shifts_nobody_elses(counts: list[int]) -> None:
    expansions = three_sequences()
    expansions.num_expansions[:] = counts
    expansions.parents[:] = ROOT
    expansions.ranks[:] = 0
    expansions.first_ids[:] = 0
    # The last expansion of all is bad as well, whoever's it is.
    expansions.child_ids[5] = VOCABULARY
    _, errors = sent(expansions)
    last = max(index for index, count in enumerate(counts) if count)
    expected = {7 + index: "num_expansions" for index, count in enumerate(counts) if not count}
    assert {key: field for key, (field, _) in errors.items()} == expected | {7 + last: "child_ids"}


def test_more_expansions_than_are_kept() -> None:
    """Catches a frame in which one expansion takes another's place."""
    for count, expected in ((64, {}), (65, {8: "num_expansions"})):
        expansions = three_sequences()
        for name in ("parents", "ranks", "child_ids", "probabilities", "candidate_ids", "candidate_weights"):
            column = getattr(expansions, name)
            more = np.repeat(column[3:4], count - 2, axis=0)
            setattr(expansions, name, np.concatenate([column[:4], more, column[4:]]))
        expansions.num_expansions[1] = count
        _, errors = sent(expansions)
        assert {key: field for key, (field, _) in errors.items()} == expected


@pytest.mark.parametrize(
    ("limits", "field", "problem"),
    [
        (DraftLimits(4, MAX_CANDIDATES, 1), "child_ids", "2 children, must be 1 to 1"),
        (DraftLimits(4, 2, 3), "candidate_ids", "3 candidates, at most 2"),
        (DraftLimits(4, 0, 3), "candidate_ids", "3 candidates, at most 0"),
    ],
)
def test_what_is_larger_than_was_agreed_upon_is_refused(limits: DraftLimits, field: str, problem: str) -> None:
    """Catches expansions for which CUDA graphs have no room, and everybody in whose step would do without one."""
    _, errors = sent(three_sequences(2, 3), limits)
    assert errors.keys() == {7, 8, 9}
    for found, error in errors.values():
        assert found == field
        assert problem in error.message
    assert sent(three_sequences(2, 3), DraftLimits(4, 3, 2))[1] == {}


def test_no_children_at_all() -> None:
    expansions = three_sequences(1)
    expansions.child_ids, expansions.probabilities = expansions.child_ids[:, :0], expansions.probabilities[:, :0]
    assert {field for field, _ in sent(expansions)[1].values()} == {"child_ids"}


def test_a_sequence_that_stands_twice() -> None:
    expansions = three_sequences()
    expansions.sequence_ids[2] = 7
    assert sent(expansions)[1].keys() == {7}


ARRAYS = [field.name for field in drafter_pb2.Expansions.DESCRIPTOR.fields]


@pytest.mark.parametrize("field", ARRAYS)
@pytest.mark.parametrize("cut", [1, 2, 4, 8])
def test_arrays_that_do_not_fit_each_other(field: str, cut: int) -> None:
    """Catches an array that is read beyond its end, or of which a part is left over: nobody knows whose it is."""
    message = pack_expansions(three_sequences(2, 4))
    data = getattr(message, field)
    for changed in (data[:-cut], data + b"\0" * cut):
        setattr(message, field, changed)
        with pytest.raises(InvalidArgumentError):
            unpack_expansions(message, vocabulary_size=VOCABULARY, limits=LIMITS)


def test_arrays_that_are_not_there() -> None:
    message = pack_expansions(three_sequences(2, 4))
    for field in ARRAYS:
        if field not in ("child_ids", "candidate_ids", "candidate_weights"):
            shorter = drafter_pb2.Expansions.FromString(message.SerializeToString())
            shorter.ClearField(field)
            with pytest.raises(InvalidArgumentError):
                unpack_expansions(shorter, vocabulary_size=VOCABULARY, limits=LIMITS)


def test_noise() -> None:
    """Catches bytes that raise anything else, and good sequences among them that are refused."""
    chance = random.Random(5)
    num_good = num_bad = num_refused = 0
    for _ in range(3000):
        message = pack_expansions(three_sequences(chance.randint(1, 3), chance.choice([0, 2, 7])))
        for _ in range(chance.randint(0, 2)):
            field = chance.choice(ARRAYS)
            data = bytearray(getattr(message, field))
            for _ in range(chance.randint(0, 3)):
                if data:
                    data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.1:
                data += chance.randbytes(chance.randint(1, 9))
            setattr(message, field, bytes(data))
        try:
            found, errors = unpack_expansions(message, vocabulary_size=VOCABULARY, limits=LIMITS)
        except InvalidArgumentError:
            num_refused += 1
            continue
        num_bad += len(errors)
        num_good += len(found.sequence_ids) - len(errors)
        assert_lawful(found, errors.keys())
    assert min(num_good, num_bad, num_refused) > 300


def assert_lawful(expansions: Expansions, bad: Sequence[int] | object) -> None:
    """One by one, without numpy's help: what is not bad keeps every rule."""
    ids = expansions.ids.tolist()
    start = 0
    for index, count in enumerate(expansions.num_expansions.tolist()):
        rows, start = range(start, start + count), start + count
        if index in bad:  # type: ignore[operator]
            continue
        assert 1 <= count <= 64
        assert expansions.num_committed[index] >= 1
        for row in rows:
            assert -1 <= expansions.parents[row] < ids[row] < 2**31
            assert expansions.ranks[row] < (1 if expansions.parents[row] == ROOT else 3)
            children = expansions.child_ids[row].tolist()
            assert len(set(children)) == len(children)
            assert all(0 <= child < VOCABULARY for child in children)
            pairs = zip(expansions.candidate_ids[row].tolist(), expansions.candidate_weights[row].tolist(), strict=True)
            q = [(token, weight) for token, weight in pairs if weight]
            assert len(dict(q)) == len(q)
            assert sum(weight for _, weight in q) in (0, 65536)
            assert not q or (children[0] in dict(q) and all(0 <= token < VOCABULARY for token, _ in q))
