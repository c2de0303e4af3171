"""Tables of penalties that follow their sequences, against what each sequence's tokens say."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from engine.penalty_tables import NO_PLACE, DevicePenalties
from engine.slots import Slot
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters

VOCABULARY = 50


class Sequence:
    """A sequence with penalties of its own, and what they make of each token."""

    def __init__(self, chance: random.Random, index: int) -> None:
        self.slot = Slot(index)
        self.sampling = SamplingParameters(
            repetition_penalty=chance.choice([0.8, 1.0, 1.5]),
            presence_penalty=chance.choice([-0.5, 0.0, 0.75]),
            frequency_penalty=chance.choice([-0.25, 0.0, 0.5]),
            logit_bias={chance.randrange(VOCABULARY): chance.choice([-100.0, 4.0]) for _ in range(3)},
        )
        self.prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
        self.output = [chance.randrange(VOCABULARY) for _ in range(chance.randint(0, 3))]
        # Below a minimum of tokens, some are banned.
        self.banned, self.min_output = [chance.randrange(VOCABULARY) for _ in range(2)], chance.choice([0, 8])
        self.history = TokenHistory(
            self.prompt,
            self.output,
            self.sampling.logit_bias,
            banned_token_ids=self.banned,
            min_output=self.min_output,
        )

    def commit(self, token_ids: list[int]) -> None:
        self.output += token_ids
        self.history.append(token_ids)

    @property
    def row(self) -> tuple[Slot, SamplingParameters, TokenHistory]:
        return self.slot, self.sampling, self.history

    def check(self, penalties: DevicePenalties, place: int) -> None:
        """Hold the place against the definition, token by token."""
        counts, sampling = Counter(self.output), self.sampling
        banned = self.banned if len(self.output) < self.min_output else []
        factors = [
            sampling.repetition_penalty if token in self.prompt or counts[token] else 1.0 for token in range(VOCABULARY)
        ]
        additions = [
            (-math.inf if token in banned else sampling.logit_bias.get(token, 0.0))
            - sampling.presence_penalty * bool(counts[token])
            - sampling.frequency_penalty * counts[token]
            for token in range(VOCABULARY)
        ]
        assert penalties.tables.factors[place].tolist() == pytest.approx(factors)
        assert penalties.tables.additions[place].tolist() == pytest.approx(additions)


def test_tables_follow_their_sequences() -> None:
    """Catches an entry that is not written anew, one of a place's last sequence, and a place that two have or none."""
    chance, num_places = random.Random(1), 3
    penalties = DevicePenalties(num_places, vocab_size=VOCABULARY, device=torch.device("cpu"))
    running = [Sequence(chance, index) for index in range(5)]
    had: set[tuple[int, int]] = set()
    for _ in range(300):
        taking_part = [sequence for sequence in running if chance.random() < 0.7]
        places = penalties.bring_up_to_date([sequence.row for sequence in taking_part])
        for sequence, place in zip(taking_part, places, strict=True):
            if place != NO_PLACE:
                had.add((id(sequence.slot), place))
                sequence.check(penalties, place)
        used = [place for place in places if place != NO_PLACE]
        assert len(set(used)) == len(used)
        assert NO_PLACE not in places or penalties.num_free == 0
        for sequence in taking_part:
            sequence.commit([chance.randrange(VOCABULARY) for _ in range(chance.choice([0, 1, 1, 5]))])
        if chance.random() < 0.3:
            index = chance.randrange(len(running))
            penalties.give_back(running[index].slot)
            # The next sequence has the same index, and a slot of its own.
            running[index] = Sequence(chance, index)
    assert {place for _, place in had} == set(range(num_places))
    assert len(had) > 30
    for sequence in running:
        penalties.give_back(sequence.slot)
    assert penalties.num_free == num_places


def test_a_sequence_without_penalties_takes_no_place() -> None:
    penalties = DevicePenalties(1, vocab_size=VOCABULARY, device=torch.device("cpu"))
    assert penalties.bring_up_to_date([(Slot(0), SamplingParameters(), None)]) == [NO_PLACE]
    penalties.give_back(Slot(0))
    assert penalties.num_free == 1


def test_a_table_is_written_only_where_something_changed() -> None:
    """Catches tables that are uploaded whole in each round."""
    penalties = DevicePenalties(2, vocab_size=VOCABULARY, device=torch.device("cpu"))
    history = TokenHistory([1, 2, 3], [4])
    row = (Slot(0), SamplingParameters(presence_penalty=1.0), history)
    (place,) = penalties.bring_up_to_date([row])
    penalties.tables.additions.fill_(7.0)
    penalties.bring_up_to_date([row])
    assert bool((penalties.tables.additions == 7.0).all())
    history.append([5, 3, 5])
    penalties.bring_up_to_date([row])
    changed = torch.nonzero(penalties.tables.additions != 7.0).tolist()
    assert changed == [[place, 3], [place, 5]]
