"""Who calls: API keys from a file, which is read again when it changes.

    [callers.team-a]
    sha256 = ["8d969eef6ecad3c29a3a629280e686cf0c3f5d5a86aff3ca12020c923adc6c92"]
    max_concurrent_requests = 16
    requests_per_minute = 600
    tokens_per_minute = 200000

Keys themselves are never logged, traced or part of an error, only callers' names.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from outrider.protocol.errors import UnauthenticatedError
from outrider.service.file_watch import FileWatch
from outrider.service.settings import BadSettingsError

logger = logging.getLogger(__name__)

# Shorter ones can be guessed; 22 characters of base64 are 128 bits.
MIN_KEY_LENGTH = 20


@dataclass(frozen=True)
class Caller:
    """Whom a request belongs to, and what it may have."""

    name: str
    # Most requests at a time, running and waiting; None: no limit of its own.
    max_concurrent: int | None = None
    # Of prompts and outputs together for the second one; None: no limit.
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


ANONYMOUS = Caller("")

Authenticate = Callable[[str | None], Caller]


def admit_anyone(authorization: str | None) -> Caller:
    """What a gateway without keys does with an `authorization` header."""
    return ANONYMOUS


class _CallerEntry(BaseModel):
    """One `[callers.NAME]` of the file. Several keys of one caller let it go over from one to the next."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    keys: list[Annotated[str, StringConstraints(min_length=MIN_KEY_LENGTH, pattern=r"^[\x21-\x7e]+$")]] = []
    sha256: list[Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]] = []
    max_concurrent_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    callers: dict[Annotated[str, StringConstraints(pattern=r"^[\w.@/-]{1,64}$")], _CallerEntry]


class Authenticator:
    """Knows the callers by the SHA-256 of their keys. Raises BadSettingsError for a file that is not usable.

    A file that becomes unusable later changes nothing: the callers stay those of the last one that was.
    """

    def __init__(self, path: Path, *, poll_seconds: float = 1.0) -> None:
        self._path = path
        # Before reading, so that a change in the meantime is not missed.
        self._watch = FileWatch([path], poll_seconds=poll_seconds)
        self._callers = _read(path)
        logger.info("%d API keys of %d callers", len(self._callers), len(set(self._callers.values())))

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller whose key an `authorization` header has. Raises UnauthenticatedError."""
        self._follow_file()
        scheme, _, key = (authorization or "").strip().partition(" ")
        if not scheme:
            raise UnauthenticatedError("authorization: this gateway needs an API key, sent as 'Bearer KEY'")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("authorization: only 'Bearer KEY' is understood")
        # Over the digests, so that neither a key's length nor its beginning shows in the time that it takes; and over
        # all of them, so that neither does its place.
        digest = hashlib.sha256(key.strip().encode(errors="backslashreplace")).digest()
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise UnauthenticatedError("authorization: the API key is not known here")
        return found

    def _follow_file(self) -> None:
        if not self._watch.has_changed():
            return
        try:
            self._callers = _read(self._path)
        except BadSettingsError as error:
            logger.error("%s; going on with the keys that were there before", error)
        else:
            logger.info(
                "read the API keys again: %d of %d callers", len(self._callers), len(set(self._callers.values()))
            )


def _read(path: Path) -> Mapping[bytes, Caller]:
    """The callers by the digests of their keys."""
    try:
        parsed = _KeyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettingsError(f"api_keys: cannot read {path}: {getattr(error, 'strerror', 'not UTF-8')}") from None
    except tomllib.TOMLDecodeError as error:
        # Its message has a place and no more than a character of what stands there.
        raise BadSettingsError(f"api_keys: {path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadSettingsError(f"api_keys: {path}: {place}: {first['msg']}") from None
    callers: dict[bytes, Caller] = {}
    for name, entry in parsed.callers.items():
        caller = Caller(name, entry.max_concurrent_requests, entry.requests_per_minute, entry.tokens_per_minute)
        digests = [hashlib.sha256(key.encode()).digest() for key in entry.keys]
        digests += [bytes.fromhex(digest) for digest in entry.sha256]
        for digest in digests:
            if digest in callers:
                raise BadSettingsError(f"api_keys: {path}: callers.{name}: one of its keys stands in the file twice")
            callers[digest] = caller
    if not callers:
        raise BadSettingsError(f"api_keys: {path} has no keys")
    return callers
