"""What a target and a drafter settle before anything is drafted: whether they fit, how much is drafted, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from outrider.protocol.errors import FailedPreconditionError, InvalidArgumentError
from outrider.protocol.wire import MIN_EXPANSIONS, NUM_EXPANSIONS
from outrider.v1 import common_pb2, drafter_pb2


@dataclass(frozen=True)
class DraftLimits:
    """How much is drafted on a stream, and in which way."""

    max_draft_tokens: int
    """Of a chain that a step verifies (K)."""
    max_candidates: int
    """Of the distribution of a first child; 0: none are sent, each first child is certain."""
    num_children: int = 1
    """Most of an expansion (F)."""
    max_expansions: int = NUM_EXPANSIONS
    """That either side keeps of a sequence (E)."""
    takes_turns: bool = False
    """Whether the drafter rests until a verdict comes, and the verifier waits for it; else it runs ahead."""

    def __str__(self) -> str:
        """As logs say it."""
        way = "in turns" if self.takes_turns else "running ahead"
        return (
            f"{way}, at most {self.max_draft_tokens} draft tokens a chain, {self.num_children} children and "
            f"{self.max_candidates} candidates an expansion, {self.max_expansions} expansions a sequence"
        )

    def to_message(self) -> drafter_pb2.DraftLimits:
        """What travels in the first frame of either side."""
        return drafter_pb2.DraftLimits(**asdict(self))

    def with_offer(self, offer: drafter_pb2.DraftLimits) -> DraftLimits:
        """What holds on a stream for whose verifier a drafter of these limits has got `offer`.

        Raises InvalidArgumentError, naming the field, for an offer of nothing.
        """
        for name, (least_offered, _) in _RANGES.items():
            if getattr(offer, name) < least_offered:
                raise InvalidArgumentError(
                    f"limits.{name}", f"must be at least {least_offered} in the first frame of a stream"
                )
        agreed = {name: min(getattr(self, name), getattr(offer, name)) for name in _RANGES}
        return DraftLimits(**agreed, takes_turns=self.takes_turns or offer.takes_turns)

    def with_answer(self, answer: drafter_pb2.DraftLimits) -> DraftLimits:
        """What holds on a stream whose drafter has answered the offer of these limits with `answer`.

        Raises FailedPreconditionError, naming the field, for more than was offered, too little to draft at all, or no
        turns where they were asked for.
        """
        for name, (_, least) in _RANGES.items():
            most = getattr(self, name)
            if not least <= getattr(answer, name) <= most:
                raise FailedPreconditionError(
                    f"limits.{name}: the drafter answered {getattr(answer, name)}, not {least} to {most}"
                )
        if self.takes_turns and not answer.takes_turns:
            raise FailedPreconditionError("limits.takes_turns: the drafter runs ahead where it was asked to take turns")
        return DraftLimits(**{name: getattr(answer, name) for name in _RANGES}, takes_turns=answer.takes_turns)


# Of each number the least that a verifier may offer, and the least that a drafter may answer.
_RANGES = {
    "max_draft_tokens": (1, 1),
    "max_candidates": (1, 0),
    "num_children": (1, 1),
    "max_expansions": (MIN_EXPANSIONS, MIN_EXPANSIONS),
}


def check_compatible(target: common_pb2.ModelIdentity, drafter: common_pb2.ModelIdentity) -> None:
    """Raise FailedPreconditionError, naming the first thing that does not fit, unless `drafter` can draft for `target`.

    A drafter without a model (vocabulary size 0) fits every vocabulary: it only repeats ids that the target has used.
    """
    _compare("protocol_version", target.protocol_version, drafter.protocol_version)
    _compare("random_scheme", target.random_scheme, drafter.random_scheme)
    if drafter.vocabulary_size and not _differ_in_padding(target, drafter):
        _compare("vocabulary_size", target.vocabulary_size, drafter.vocabulary_size)
    if target.tokenizer_fingerprint and drafter.tokenizer_fingerprint:
        _compare("tokenizer_fingerprint", target.tokenizer_fingerprint, drafter.tokenizer_fingerprint)
    if drafter.target_revision:
        _compare("revision", target.revision, drafter.target_revision)


def _differ_in_padding(target: common_pb2.ModelIdentity, drafter: common_pb2.ModelIdentity) -> bool:
    """Whether both have one tokenizer's ids, and only ids beyond those are one's and not the other's.

    Of such ids the drafter proposes none: q is 0 there, whatever p may be.
    """
    tokenizers = [(model.tokenizer_fingerprint, model.num_token_ids) for model in (target, drafter)]
    has_one = tokenizers[0] == tokenizers[1] and tokenizers[0][0] != ""
    return has_one and 0 < target.num_token_ids <= min(target.vocabulary_size, drafter.vocabulary_size)


def _compare(field: str, target: object, drafter: object) -> None:
    if target != drafter:
        raise FailedPreconditionError(f"{field}: the target has {target!r}, the drafter {drafter!r}")
