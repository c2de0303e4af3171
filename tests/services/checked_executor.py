"""An executor that holds its callers to the contract of `engine.step`, whose passes land late and fail now and then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from engine.batch import Batch
from engine.model_runner import ModelRunner
from engine.slots import Slot
from engine.step import Pass, PassKind, Row, Sampled, Wanted
from verifier_service.executor import TargetExecutor


class BreakdownError(RuntimeError):
    """What the device raises where the test lets it."""


@dataclass
class Weather:
    """How likely it is that something happens."""

    landing: float = 1.0  # a pass is found to have come back, each time that somebody looks
    breakdown: float = 0.0  # a step fails as it is launched, or one of its passes as it is collected


class CheckedPass:
    def __init__(
        self, inner: Pass[Sampled], rows: Sequence[Row], executor: CheckedExecutor, *, is_doomed: bool
    ) -> None:
        self._inner = inner
        self._executor = executor
        self.rows: Sequence[int] = inner.rows
        self.kind: PassKind = inner.kind
        self.all_rows = rows
        self.is_doomed = is_doomed

    @property
    def is_done(self) -> bool:
        return self._executor.has_landed() and self._inner.is_done

    def collect(self) -> Sequence[Sampled | None]:
        return self._executor.collect(self, self._inner)


class CheckedExecutor:
    """`on_failure` hears of the rows of a pass that fails, just before the engine does."""

    def __init__(
        self,
        inner: TargetExecutor,
        runner: ModelRunner,
        chance: random.Random,
        weather: Weather,
        seen: Counter[str],
        on_failure: Callable[[Sequence[Row]], None],
        *,
        max_in_flight: int,
    ) -> None:
        self._inner = inner
        self._runner = runner
        self._chance = chance
        self.weather = weather
        self._seen = seen
        self._on_failure = on_failure
        self.max_in_flight = max_in_flight
        self.steps_in_flight: list[list[CheckedPass]] = []
        # Tokens that the host knows of a slot's sequence, those of steps in flight left out.
        self._known: dict[Slot, int] = {}
        self._has_failed = False  # the pass that came back last
        self.errors: list[Exception] = []  # that nobody planted

    def can_overlap(self, row: Row) -> bool:
        return self._inner.can_overlap(row)

    def has_landed(self) -> bool:
        return self._chance.random() < self.weather.landing

    def submit(self, rows: Sequence[Row]) -> Sequence[Pass[Sampled]]:
        self._check(rows)
        breaks_down = self._breaks_down()
        with mock.patch.object(
            self._runner, "forward", side_effect=BreakdownError("at launch") if breaks_down else self._forward_of(rows)
        ):
            inner = self._inner.submit(rows)
        self._seen["broke down at launch"] += breaks_down
        passes = [CheckedPass(one, [rows[index] for index in one.rows], self, is_doomed=breaks_down) for one in inner]
        assert sorted(index for one in passes for index in one.rows) == list(range(len(rows)))
        self.steps_in_flight.append(list(passes))
        self._count(rows)
        return passes

    def collect(self, one: CheckedPass, inner: Pass[Sampled]) -> Sequence[Sampled | None]:
        assert self.steps_in_flight[0].pop(0) is one, "passes are collected in the order of their submission"
        if not self.steps_in_flight[0]:
            self.steps_in_flight.pop(0)
        try:
            sampled = inner.collect()
            if self._breaks_down():
                self._seen["broke down in flight"] += 1
                raise BreakdownError("in flight")
        except BreakdownError:
            self._has_failed = True
            self._on_failure(one.all_rows)
            raise
        except Exception as error:
            self.errors.append(error)
            raise
        self._has_failed = False
        for row, found in zip(one.all_rows, sampled, strict=True):
            assert (found is not None) == (row.wanted is Wanted.TOKENS)
            if found is not None:
                self._known[row.slot] += len(found.token_ids)
        return sampled

    def _breaks_down(self) -> bool:
        """Never so often in a row that the device would be taken for dead."""
        if self._has_failed or any(one.is_doomed for step in self.steps_in_flight for one in step):
            return False
        return self._chance.random() < self.weather.breakdown

    def _check(self, rows: Sequence[Row]) -> None:
        """What the contract demands of whoever submits a step."""
        assert rows
        assert len(self.steps_in_flight) < self.max_in_flight, "too many steps in flight"
        assert len({row.slot.index for row in rows}) == len(rows), "two rows of a step share a slot"
        for row in rows:
            ahead = self._ahead(row.slot)
            assert not ahead or self.can_overlap(row), "a row that must not follow a step in flight does"
            if row.is_chained:
                assert any(other.wanted is Wanted.TOKENS for other in ahead), "a row is chained to nothing"
                assert not row.drafts.token_ids
                assert row.wanted is Wanted.TOKENS
                end = self._known[row.slot] + sum(1 + len(other.drafts.token_ids) for other in ahead)
            else:
                assert row.token_ids
                self._known[row.slot] = row.start + len(row.token_ids)
                end = self._known[row.slot] + len(row.drafts.token_ids)
            assert end <= self._runner.max_length, "a row reaches behind the last position"
            assert len(row.blocks) * self._runner.block_size >= end, "a row reaches behind its blocks"

    def _forward_of(self, rows: Sequence[Row]) -> Callable[[Batch], torch.Tensor]:
        """The runner's `forward`, for a step that may write to its own rows' blocks and to no others."""
        forward, blocks = self._runner.forward, {block for row in rows for block in row.blocks}

        def checked(batch: Batch) -> torch.Tensor:
            places = batch.slot_mapping[batch.slot_mapping >= 0]
            if not blocks.issuperset((places // self._runner.block_size).tolist()):
                self.errors.append(AssertionError("a step writes to blocks that are not its own"))
            return forward(batch)

        return checked

    def _ahead(self, slot: Slot) -> list[Row]:
        passes = [one for step in self.steps_in_flight for one in step]
        return [row for one in passes for row in one.all_rows if row.slot is slot]

    def _count(self, rows: Sequence[Row]) -> None:
        *before, last = self.steps_in_flight
        kinds = {one.kind for step in before for one in step} | {one.kind for one in last}
        self._seen["steps"] += 1
        self._seen["steps behind another"] += bool(before)
        self._seen["prompts beside decoding"] += len(kinds) > 1
        in_prompts = [row for one in last if one.kind is PassKind.PROMPT for row in one.all_rows]
        self._seen["rode along"] += sum(row.is_chained for row in in_prompts)
        for row in rows:
            if row.is_chained:
                others = [other for step in before for one in step for other in one.all_rows if other.slot is row.slot]
                self._seen["chained"] += 1
                self._seen["chained behind drafts"] += any(other.drafts.token_ids for other in others)
                self._seen["chained behind a prompt"] += any(len(other.token_ids) > 1 for other in others)
