"""A verifier's engine among gateways and drafters that do what they like: one thread, no network, its own clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

import grpc

from drafter_service.engine import DrafterEngine
from engine.model_runner import ModelRunner
from engine.step import Row
from outrider.protocol.errors import code_number
from outrider.protocol.wire import pack_tokens
from outrider.v1 import verifier_pb2
from tests.services.asked import Asked
from tests.services.bare_engine import Clock, LinkIds, LoadedTarget, completion, make_executor, parse
from tests.services.checked_executor import CheckedExecutor, Weather
from tests.services.known_answers import Answer
from tests.services.simulated_drafters import AHEAD, TURNS, Link, Manners, RandomDrafter, break_the_rules, sequence_ids
from verifier_service.draft_tree import SequenceExpansions
from verifier_service.engine import VerifierEngine
from verifier_service.events import (
    Event,
    ExpansionsArrived,
    LinkDown,
    LinkRetired,
    LinkUp,
    OpeningRefused,
    SequenceOpened,
    SequencesClosed,
    SessionClosed,
    StepOutput,
)
from verifier_service.frames import read_expansions
from verifier_service.speculation import ALONE, LinkKey

REFUSED = code_number(grpc.StatusCode.INVALID_ARGUMENT)
ADDRESSES = ("drafter:1", "drafter:2")


class History:
    """One engine's life, as a seed decides it. `seen` counts what happened."""

    def __init__(self, seed: int, runner: ModelRunner, answers: Sequence[Answer], clock: Clock) -> None:
        self._chance = chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._runner, self._answers, self._clock = runner, answers, clock
        # Whether drafters vanish while what they drafted is being verified, which seldom comes by itself.
        self._is_lossy = chance.random() < 0.3
        self._max_running = chance.choice([2, 3, 4, 6])
        inner = make_executor(runner, self._max_running)
        max_in_flight = chance.choice([1, 1, *[2] * 8])
        if max_in_flight > 1 or chance.random() < 0.5:
            inner.use_graphs(None)
        weather = Weather(
            landing=0.03 if self._is_lossy else chance.choice([0.03, 0.1, 0.3, 1.0]),
            breakdown=chance.choice([0.0, 0.01, 0.03]),
        )
        self._executor = CheckedExecutor(
            inner, runner, chance, weather, self.seen, self._fail, max_in_flight=max_in_flight
        )
        self._draft_timeout = chance.choice([0.02, 0.05, 0.3])
        self._engine = VerifierEngine(
            LoadedTarget(runner, self._executor, chance.choice([33, 40, 64])),
            max_running=self._max_running,
            max_waiting=chance.choice([2, 8, 8]),
            split_from=chance.choice([2, 4, 1 << 30]),
            draft_timeout=self._draft_timeout,
            is_polling=self._is_lossy or chance.random() < 0.8,
        )
        self._engine.load()
        self._wakes_at: float | None = clock.now  # None: at the next event
        self._serials = count(1)
        self._sessions = [next(self._serials), next(self._serials)]
        self._all_asked: dict[tuple[int, int], Asked] = {}
        # How often a sequence gets a drafter; only without any are steps chained for long.
        self._drafted = 0.9 if self._is_lossy else chance.choice([0.0, 0.6, 0.95])
        self._rules = chance.choice([0.0, 0.05, 0.1])  # how often drafters break them
        self._texts: dict[int, list[int]] = {}
        # How drafters work, all of them at one verifier.
        self._limits = chance.choice([TURNS, AHEAD])
        self._drafters = {address: self._drafter() for address in ADDRESSES}
        self._links: dict[str, Link] = {}  # those that are up, by address
        self._past_keys: list[LinkKey] = []
        self._dropped: list[LinkKey] = []  # that the engine wants closed
        for address in ADDRESSES:
            self._dial(address)

    def _drafter(self) -> DrafterEngine:
        chance = self._chance
        manners = Manners(
            working=chance.choice([0.5] if self._is_lossy else [0.0, 0.2, 0.5, 0.9]),
            nothing=chance.choice([0.0, 0.05, 0.2]),
            refusal=chance.choice([0.0, 0.02]),
            wrong=chance.choice([0.05, 0.15, 0.4]),
            candidates=chance.choice([0.0, 0.2]),
        )
        drafter = RandomDrafter(self._texts, self._runner.vocab_size, chance, manners)
        return DrafterEngine(drafter, max_sequences=100 if self._is_lossy else chance.choice([1, 4, 100]))

    # What goes on.

    def play(self, num_moves: int) -> None:
        """So many events, with steps between them, then everything that was asked for to its end."""
        chance = self._chance
        moves = [
            (self._open, 1.0),
            (self._work, 5.0),
            (self._hear, 4.0),
            (self._close, 0.4 * chance.random()),
            (self._close_session, chance.choice([0.0, 0.01])),
            (self._refuse, 0.02),
            (self._lose_a_link, chance.choice([0.0, 0.02, 0.05])),
            (self._lose_all_links, 3.0 if self._is_lossy else 0.0),
            (self._dial_again, 2.0),
            (self._retire_a_link, chance.choice([0.0, 0.0, 0.05])),
            (self._silence_a_link, chance.choice([0.0, 0.0, 0.02])),
            (self._pass_time, chance.choice([0.0, 0.05, 0.2])),
        ]
        for move in chance.choices(*zip(*moves, strict=True), k=num_moves):
            move()
            self._turn()
        self._settle()
        self._check_that_all_is_over()
        self.seen["preemptions"] += self._engine._scheduler.num_preemptions
        self.seen["late"] += self._engine._links.num_late

    def _turn(self) -> None:
        """A moment passes, and the engine takes a step if its thread is awake."""
        self._clock.now += self._chance.choice([0.0, 0.0002, 0.002])
        while self._dropped and self._chance.random() < 0.3:
            self._close_link(self._dropped.pop())
        if self._wakes_at is None or self._wakes_at > self._clock.now or self._chance.random() < 0.2:
            return
        seconds = self._engine.step(self._take)
        self._wakes_at = None if seconds is None else self._clock.now + seconds
        self._check()

    def _handle(self, event: Event) -> None:
        self._engine.handle(event)
        self._wakes_at = self._clock.now

    def _settle(self) -> None:
        """Nothing new is asked for, and all that is under way arrives."""
        self._executor.weather.landing = max(0.3, self._executor.weather.landing)
        for _ in range(20_000):
            is_moving = any([self._advance(link) for link in self._links.values()] + [self._hear()])
            self._turn()
            is_moving |= bool(self._dropped) or any(link.to_drafter for link in self._links.values())
            if is_moving or (self._wakes_at is not None and self._wakes_at <= self._clock.now):
                continue
            if not self._engine.is_busy:
                return
            assert self._wakes_at is not None, "asleep for ever"
            self._clock.now = self._wakes_at
        raise AssertionError("this never ends")

    # What gateways do.

    def _open(self) -> None:
        if sum(not asked.is_over for asked in self._all_asked.values()) > 2 * self._max_running:
            return
        chance, answer = self._chance, self._chance.choice(self._answers)
        start, last = len(answer.prompt), len(answer.text)
        if chance.random() < 0.2:
            start = chance.randrange(start, last)
        limit = last if chance.random() < 0.3 else chance.randint(start + 1, last)
        rest = answer.text[start:limit]
        eos, stops = (frozenset(chance.sample(rest, k=int(chance.random() < 0.15))) for _ in range(2))
        if answer.min_tokens:
            eos, stops = answer.ending, frozenset()
        names_no_limit = limit == self._runner.max_length and chance.random() < 0.5
        message = verifier_pb2.OpenDecoding(
            sequence_id=next(self._serials),
            token_ids=pack_tokens(answer.text[:start]),
            num_prompt_tokens=len(answer.prompt),
            sampling=answer.sampling,
            max_tokens=0 if names_no_limit else limit - len(answer.prompt),
            stop_token_ids=stops,
            max_draft_tokens=chance.choice([0, 1, 2, 3, 4]),
            min_tokens=answer.min_tokens,
            logprobs=chance.choice([None, None, 0, 1, 3]),
        )
        drafter = self._some_link() if chance.random() < self._drafted else None
        # With rejection, what drafters propose would decide which tokens a seed gives.
        message.is_seeded = drafter is not None or chance.random() < 0.5
        ids = LinkIds(chance.choice(self._sessions), next(self._serials), drafter, self._limits)
        sequence = parse(message, self._runner, ids, eos)
        self._texts[sequence.link_sequence_id] = answer.text
        self.seen["opened"] += 1
        self.seen["opened with a drafter"] += drafter is not None
        asked = Asked(sequence, answer, start, *completion(answer, start, limit, eos, stops))
        self._all_asked[sequence.session_id, sequence.sequence_id] = asked
        self._handle(SequenceOpened(sequence))

    def _close(self) -> None:
        """Some are over already, though their gateway may not know."""
        session_id, num_closed = self._chance.choice(self._sessions), self._chance.randint(1, 2)
        mine = [asked.sequence.sequence_id for (of, _), asked in self._all_asked.items() if of == session_id]
        closed = self._chance.sample(mine[-8:], min(num_closed, len(mine)))
        for sequence_id in closed:
            self._has_closed(self._all_asked[session_id, sequence_id])
        self._handle(SequencesClosed(session_id, closed))

    def _close_session(self) -> None:
        session_id = self._sessions.pop(self._chance.randrange(len(self._sessions)))
        self._sessions.append(next(self._serials))
        for (of, _), asked in self._all_asked.items():
            if of == session_id:
                self._has_closed(asked)
        self._handle(SessionClosed(session_id))

    def _has_closed(self, asked: Asked) -> None:
        if not asked.is_over:
            asked.is_closed = True
            self.seen["closed"] += 1
            self.seen["closed in flight"] += asked.sequence.num_in_flight > 0

    def _refuse(self) -> None:
        error = verifier_pb2.SequenceError(code=REFUSED)
        self._handle(OpeningRefused(self._sessions[0], next(self._serials), error))

    # What drafters and the network do.

    def _some_link(self) -> LinkKey | None:
        if self._past_keys and self._chance.random() < 0.05:
            return self._chance.choice(self._past_keys)  # gone while the opening was on its way
        link = self._links.get(self._chance.choice(ADDRESSES))
        return link.key if link is not None and not link.is_retired else None

    def _any_link(self) -> Link | None:
        return self._chance.choice([*self._links.values()]) if self._links else None

    def _work(self) -> None:
        for link in self._links.values():
            self._advance(link)

    def _advance(self, link: Link) -> bool:
        """Frames reach a drafter, and it drafts; whether anything has happened."""
        num_frames = sum([link.deliver() for _ in range(self._chance.randint(0, 3))])
        num_before = len(link.to_verifier)
        seconds = link.engine.step(link.take)
        return bool(num_frames or link.to_drafter or seconds == 0.0 or len(link.to_verifier) > num_before)

    def _hear(self) -> bool:
        """A drafter's frame reaches the engine; whether there was one."""
        speaking = [link for link in self._links.values() if link.to_verifier]
        if not speaking:
            return False
        link = self._chance.choice(speaking)
        frame = link.to_verifier.popleft()
        unlawful = None
        if self._chance.random() < self._rules:
            unlawful = break_the_rules(frame, link, self._runner.vocab_size, self._chance, self.seen)
        named = set(sequence_ids(frame))
        drafted = {sequence.link_sequence_id: sequence for sequence in self._engine._sequences.of_drafter(link.key)}
        is_known = self._engine._links.is_up(link.key)
        expansions = read_expansions(frame.expansions, self._runner.vocab_size, link.limits)
        for part in expansions:
            if isinstance(part, SequenceExpansions) and (sequence := drafted.get(part.sequence_id)) is not None:
                self.seen["overtaken frames"] += part.num_committed < sequence.length
        self._handle(ExpansionsArrived(link.key, expansions, frame.refusals, frame.step_seconds))
        lost = {link_id for link_id, sequence in drafted.items() if sequence.speculation.state is ALONE}
        assert lost <= named, "a frame ends the speculation of sequences that it does not name"
        if is_known and self._engine._sequences.drafted_by(link.key, unlawful or 0) is not None:
            raise AssertionError("an unlawful frame has no consequence")
        return True

    def _dial(self, address: str) -> None:
        key = LinkKey(address, next(self._serials))
        self._links[address] = link = Link(key, self._drafters[address], self._limits)
        link.open()
        self._handle(LinkUp(key, self._chance.choice([0, 0, 0, 0, 30, 50])))

    def _dial_again(self) -> None:
        for address in ADDRESSES:
            if address not in self._links:
                self._dial(address)

    def _lose_a_link(self) -> None:
        if (link := self._any_link()) is not None:
            self._close_link(link.key)

    def _lose_all_links(self) -> None:
        """While drafts are verified: who speculates no more may be chained to the step that does."""
        if any(row.drafts.token_ids for step in self._executor.steps_in_flight for one in step for row in one.all_rows):
            for link in [*self._links.values()]:
                self._close_link(link.key)

    def _close_link(self, key: LinkKey) -> None:
        link = self._links.get(key.address)
        if link is not None and link.key == key:
            del self._links[key.address]
            self._past_keys.append(key)
            link.close()
            in_flight = [s for s in self._engine._sequences.of_drafter(key) if s.num_in_flight]
            self.seen["lost in flight"] += len(in_flight)
            self._handle(LinkDown(key))

    def _retire_a_link(self) -> None:
        if (link := self._any_link()) is not None:
            link.is_retired = not link.is_retired
            self._handle(LinkRetired(link.key, is_retired=link.is_retired))

    def _silence_a_link(self) -> None:
        if (link := self._any_link()) is not None:
            link.is_silent = True

    def _pass_time(self) -> None:
        self._clock.now += self._chance.choice([0.3, 0.6, 1.1]) * self._draft_timeout

    # What comes back.

    def _take(self, output: StepOutput) -> None:
        for session_id, frame in output.session_frames.items():
            for update in frame.updates:
                if update.ended.error.code == REFUSED:
                    continue
                self._all_asked[session_id, update.sequence_id].take(update, self.seen)
        for key, request in output.link_frames.items():
            link = self._links.get(key.address)
            if link is not None and link.key == key:
                link.to_drafter.append(request)
        self.seen["silent links"] += len(output.silent_links)
        self.seen["idle links"] += len(output.idle_links)
        self._dropped += sorted([*output.silent_links, *output.idle_links])  # sets gave their order

    def _fail(self, rows: Sequence[Row]) -> None:
        """The rows' pass is about to fail."""
        slots = [row.slot for row in rows]
        for sequence in self._engine._scheduler.running:
            if sequence.slot in slots:
                self._all_asked[sequence.session_id, sequence.sequence_id].has_failed = True

    # What must hold.

    def _check(self) -> None:
        if self._executor.errors:
            raise self._executor.errors[0]
        scheduler = self._engine._scheduler
        running, queue = list(scheduler.running), list(scheduler.queue)
        scheduler.blocks.check(sequence.block_ids for sequence in running)
        assert not any(sequence.block_ids or sequence.slot for sequence in queue)
        taken = [sequence.slot.index for sequence in running if sequence.slot is not None]
        assert len(taken) == len(running) <= self._max_running
        assert sorted([*taken, *scheduler._slots._free]) == list(range(self._max_running))

    def _check_that_all_is_over(self) -> None:
        engine = self._engine
        assert not engine.is_busy
        assert not self._executor.steps_in_flight
        assert engine._scheduler.blocks.num_free == self._runner.num_blocks
        assert engine._scheduler._slots.num_free == self._max_running
        assert not engine._sequences._at_drafters
        for link in self._links.values():
            assert not link.engine.num_sequences, "a drafter keeps what nobody wants"
        for asked in self._all_asked.values():
            assert asked.is_over
            assert asked.sequence.num_in_flight == asked.sequence.num_unknown == 0
