"""Who may connect and over what: TLS on the server's side and on the dialling side, and the names of peers.

Certificates are read again when their files change: connections that exist go on, new ones use the new files.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from outrider.protocol.errors import PermissionDeniedError
from outrider.service.settings import BadSettingsError, ServiceSettings
from outrider.service.tls_files import BadTlsFilesError, TlsFiles

logger = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]
Dial = Callable[[str, Options], grpc.aio.Channel]

# How often files are looked at, if connections are made as often.
POLL_SECONDS = 1.0


def dial_plaintext(address: str, options: Options) -> grpc.aio.Channel:
    """A channel without encryption."""
    return grpc.aio.insecure_channel(address, options=options)


def make_dial(settings: ServiceSettings) -> Dial:
    """What opens channels to other services: by TLS where the settings name an authority to check them by.

    Raises BadSettingsError for files that are not usable.
    """
    if settings.tls_ca is None:
        return dial_plaintext
    files = _files("tls_ca", settings, ca=settings.tls_ca)

    def dial(address: str, options: Options) -> grpc.aio.Channel:
        pem = files.current()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    return dial


class ServerSecurity:
    """TLS of a service's own ports, and who may call it. Raises BadSettingsError for files that are not usable."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._checks_clients = settings.tls_client_ca is not None
        self._allowed_clients = frozenset(settings.tls_allowed_clients)
        self._files: TlsFiles | None = None
        if settings.tls_certificate is not None:
            self._files = _files("tls_certificate", settings, ca=settings.tls_client_ca)

    @property
    def is_encrypted(self) -> bool:
        """Whether clients must speak TLS."""
        return self._files is not None

    def add_port(self, server: grpc.aio.Server, listen: str) -> int:
        """Bind the server; its port. Raises RuntimeError when the address is taken."""
        files = self._files
        if files is None:
            return server.add_insecure_port(listen)
        given = files.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # Asked by gRPC's threads at each connection; None: no change.
            nonlocal given
            pem = files.current()
            if pem is given:
                return None
            given = pem
            return _configuration(pem.certificate, pem.key, pem.ca)

        first = _configuration(given.certificate, given.key, given.ca)
        credentials = grpc.dynamic_ssl_server_credentials(
            first,
            newer,  # type: ignore[arg-type]  # the stubs do not know that None is no change
            require_client_authentication=self._checks_clients,
        )
        return server.add_secure_port(listen, credentials)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The same for a server that is not gRPC's; None without TLS."""
        return None if self._files is None else _FollowingContext(self._files, self._check_certificate)

    def check_caller(self, context: Any) -> None:
        """Raise PermissionDeniedError unless the certificate of a gRPC call's client has an allowed name."""
        if self._allowed_clients:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            self._check_names([name.decode(errors="replace") for name in names])

    def _check_certificate(self, certificate: Mapping[str, Any] | None) -> None:
        # The same for what `ssl.SSLObject.getpeercert` returns.
        if self._allowed_clients:
            self._check_names([value for _, value in (certificate or {}).get("subjectAltName", ())])

    def _check_names(self, names: Collection[str]) -> None:
        if self._allowed_clients.isdisjoint(names):
            shown = ", ".join(names) or "no name"
            raise PermissionDeniedError(f"a client whose certificate is for {shown} may not call this service")


class _FollowingContext(ssl.SSLContext):
    """Stands for a context with the files of the moment at which a connection begins.

    Not one context that loads new files, as there an authority once trusted stays so.
    """

    _files: TlsFiles
    _object_class: type[ssl.SSLObject]

    def __new__(cls, files: TlsFiles, check: Callable[[Mapping[str, Any] | None], None]) -> Self:
        class Checked(ssl.SSLObject):
            def do_handshake(self) -> None:
                super().do_handshake()
                try:
                    check(self.getpeercert())
                except PermissionDeniedError as error:
                    logger.info("a connection was refused: %s", error)
                    raise ssl.SSLCertVerificationError(error.message) from None

        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._files, self._object_class = files, Checked
        return self

    def wrap_bio(self, *arguments: Any, **keywords: Any) -> ssl.SSLObject:
        """What asyncio calls for each connection."""
        context = self._files.current().context
        context.sslobject_class = self._object_class
        return context.wrap_bio(*arguments, **keywords)


def _configuration(
    certificate: bytes | None, key: bytes | None, client_ca: bytes | None
) -> grpc.ServerCertificateConfiguration:
    assert certificate is not None
    assert key is not None
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)


def _files(setting: str, settings: ServiceSettings, *, ca: Path | None) -> TlsFiles:
    try:
        return TlsFiles(certificate=settings.tls_certificate, key=settings.tls_key, ca=ca, poll_seconds=POLL_SECONDS)
    except BadTlsFilesError as error:
        raise BadSettingsError(f"{setting}: {error}") from error
