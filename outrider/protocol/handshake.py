"""What a target and a drafter settle before the first proposal: whether they fit, and how large proposals may be."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.errors import FailedPreconditionError, InvalidArgumentError
from outrider.v1 import common_pb2, drafter_pb2


@dataclass(frozen=True)
class DraftLimits:
    """How large proposals may be."""

    max_draft_tokens: int
    """Of a proposal (K)."""
    max_candidates: int
    """Of a draft token; 0: none are sent, each draft token is certain."""

    def to_message(self) -> drafter_pb2.DraftLimits:
        """What travels in the first frame of either side."""
        return drafter_pb2.DraftLimits(max_draft_tokens=self.max_draft_tokens, max_candidates=self.max_candidates)

    def with_offer(self, offer: drafter_pb2.DraftLimits) -> DraftLimits:
        """What holds on a stream for whose verifier a drafter of these limits has got `offer`.

        Raises InvalidArgumentError, naming the field, for an offer of nothing.
        """
        for name in ("max_draft_tokens", "max_candidates"):
            if getattr(offer, name) < 1:
                raise InvalidArgumentError(f"limits.{name}", "must be at least 1 in the first frame of a stream")
        return DraftLimits(
            min(self.max_draft_tokens, offer.max_draft_tokens), min(self.max_candidates, offer.max_candidates)
        )

    def with_answer(self, answer: drafter_pb2.DraftLimits) -> DraftLimits:
        """What holds on a stream whose drafter has answered the offer of these limits with `answer`.

        Raises FailedPreconditionError, naming the field, for more than was offered, or no draft tokens at all.
        """
        for name, least, most in (
            ("max_draft_tokens", 1, self.max_draft_tokens),
            ("max_candidates", 0, self.max_candidates),
        ):
            if not least <= getattr(answer, name) <= most:
                raise FailedPreconditionError(
                    f"limits.{name}: the drafter answered {getattr(answer, name)}, not {least} to {most}"
                )
        return DraftLimits(answer.max_draft_tokens, answer.max_candidates)


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
