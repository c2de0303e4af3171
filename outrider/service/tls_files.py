"""A certificate, its key and the authorities to trust, in PEM files that are read again when they change."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

from outrider.service.file_watch import FileWatch, signature

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class BadTlsFilesError(Exception):
    """The files cannot be used; the message names them and is for the operator."""


@dataclass(frozen=True)
class Pem:
    """What the files hold at one moment."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None
    # For a server other than gRPC's; demands certificates of clients where there is an authority to check them by.
    context: ssl.SSLContext = field(compare=False)


class TlsFiles:
    """The files of one end of connections. Safe to use from any thread.

    Raises BadTlsFilesError for files that are not usable. Where they become so later, as while they are being replaced
    one by one, the last usable ones stay in force.
    """

    def __init__(
        self, *, certificate: Path | None = None, key: Path | None = None, ca: Path | None = None, poll_seconds: float
    ) -> None:
        self._certificate, self._key, self._ca = certificate, key, ca
        self._paths = [path for path in (certificate, key, ca) if path is not None]
        self._lock = threading.Lock()
        # Before reading, so that a change in the meantime is not missed.
        self._watch = FileWatch(self._paths, poll_seconds=poll_seconds)
        self._current = self._read()

    def current(self) -> Pem:
        """What the files hold now, the same object for as long as they do not change."""
        with self._lock:
            if self._watch.has_changed():
                try:
                    found = self._read()
                except BadTlsFilesError as error:
                    logger.error("%s; going on with the certificates that were there before", error)
                else:
                    if found != self._current:
                        logger.info("read anew: %s", ", ".join(str(path) for path in self._paths))
                        self._current = found
            return self._current

    def _read(self) -> Pem:
        for _ in range(_ATTEMPTS):
            before = signature(self._paths)
            try:
                certificate, key, ca = (_contents(path) for path in (self._certificate, self._key, self._ca))
                found = Pem(certificate, key, ca, self._make_context())
            except BadTlsFilesError:
                if signature(self._paths) == before:
                    raise
                continue
            # All of one moment, and not some from before a symlink was swapped.
            if signature(self._paths) == before:
                return found
        raise BadTlsFilesError(f"{self._paths[0]} does not stop changing")

    def _make_context(self) -> ssl.SSLContext:
        # Also the check of what the files hold: gRPC would take anything, and fail with each connection.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._certificate is not None:
            try:
                # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
                context.load_cert_chain(self._certificate, self._key, password="")
            except OSError as error:
                reason = getattr(error, "reason", None) or "not PEM, or an encrypted key"
                message = f"{self._certificate} and {self._key} are not a certificate and its key: {reason}"
                raise BadTlsFilesError(message) from None
        if self._ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._ca)
            except OSError as error:
                reason = getattr(error, "reason", None) or "not PEM"
                raise BadTlsFilesError(f"{self._ca} has no certificates of authorities: {reason}") from None
        return context


def _contents(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise BadTlsFilesError(f"cannot read {path}: {error.strerror}") from None
