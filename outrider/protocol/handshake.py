"""What a target and a drafter compare before the first proposal."""

from __future__ import annotations

from outrider.protocol.errors import FailedPreconditionError
from outrider.v1 import common_pb2


def check_compatible(target: common_pb2.ModelIdentity, drafter: common_pb2.ModelIdentity) -> None:
    """Raise FailedPreconditionError, naming the first thing that does not fit, unless `drafter` can draft for `target`.

    A drafter without a model (vocabulary size 0) fits every vocabulary: it only repeats ids that the target has used.
    """
    _compare("protocol_version", target.protocol_version, drafter.protocol_version)
    _compare("random_scheme", target.random_scheme, drafter.random_scheme)
    if drafter.vocabulary_size:
        _compare("vocabulary_size", target.vocabulary_size, drafter.vocabulary_size)
    if target.tokenizer_fingerprint and drafter.tokenizer_fingerprint:
        _compare("tokenizer_fingerprint", target.tokenizer_fingerprint, drafter.tokenizer_fingerprint)
    if drafter.target_revision:
        _compare("revision", target.revision, drafter.target_revision)


def _compare(field: str, target: object, drafter: object) -> None:
    if target != drafter:
        raise FailedPreconditionError(f"{field}: the target has {target!r}, the drafter {drafter!r}")
