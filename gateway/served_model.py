"""What the gateway knows about the model that its verifiers serve."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.protocol.errors import FailedPreconditionError
from outrider.v1 import verifier_pb2


@dataclass(frozen=True)
class ServedModel:
    """The target model as a verifier's handshake describes it."""

    name: str
    revision: str
    context_length: int  # tokens, prompt included; 0: no limit
    vocabulary_size: int
    tokenizer_fingerprint: str  # empty: the verifier has no tokenizer

    @classmethod
    def from_info(cls, info: verifier_pb2.VerifierServiceGetInfoResponse) -> ServedModel:
        """The model of a GetInfo answer. Raises FailedPreconditionError when it has no vocabulary."""
        identity = info.identity
        if not identity.vocabulary_size:
            raise FailedPreconditionError("vocabulary_size: the verifier reports none")
        return cls(
            name=identity.name,
            revision=identity.revision,
            context_length=identity.max_length,
            vocabulary_size=identity.vocabulary_size,
            tokenizer_fingerprint=identity.tokenizer_fingerprint,
        )

    def check_same(self, other: ServedModel) -> None:
        """Raise FailedPreconditionError, naming the first difference, unless requests fit `other` just as well.

        Names and revisions may differ: they do while a new build of the same model is rolled out.
        """
        for field in fields(self):
            if field.name in ("name", "revision"):
                continue
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise FailedPreconditionError(f"{field.name}: the other verifiers have {ours!r}, this one {theirs!r}")
