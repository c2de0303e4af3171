"""Authorities and certificates for tests, in files as Kubernetes mounts them: behind a symlink that is swapped."""

from __future__ import annotations

import os
from pathlib import Path

import trustme


class Mounted:
    """A folder with ca.crt, tls.crt and tls.key, whose contents can be replaced at once."""

    def __init__(self, folder: Path, name: str, authority: trustme.CA, *names: str) -> None:
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._names = (name, *names)
        self._num_versions = 0
        self.renew(authority)

    @property
    def ca(self) -> Path:
        """The authority of the last renewal."""
        return self._folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The certificate, with those that lead to its authority."""
        return self._folder / "tls.crt"

    @property
    def key(self) -> Path:
        """The certificate's key."""
        return self._folder / "tls.key"

    def renew(self, authority: trustme.CA) -> None:
        """A new certificate and key, and the authority that signed it, all at the same moment."""
        self._num_versions += 1
        version = self._folder / f"..{self._num_versions}"
        version.mkdir()
        issued = authority.issue_cert(*self._names)
        authority.cert_pem.write_to_path(str(version / "ca.crt"))
        issued.private_key_pem.write_to_path(str(version / "tls.key"))
        (version / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        link = self._folder / "..new"
        link.symlink_to(version.name)
        os.replace(link, self._folder / "..data")
        for name in ("ca.crt", "tls.crt", "tls.key"):
            path = self._folder / name
            if not path.is_symlink():
                path.symlink_to(f"..data/{name}")

    def serving(self, *, clients: bool = False, allowed: tuple[str, ...] = ()) -> dict[str, object]:
        """Settings of a service with this certificate; with `clients`, that asks for one of the same authority."""
        settings: dict[str, object] = {"tls_certificate": self.certificate, "tls_key": self.key}
        if clients:
            settings |= {"tls_client_ca": self.ca, "tls_allowed_clients": allowed}
        return settings
