"""Who may call the gateway of a local cluster, and over what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class FrontDoor:
    """Settings of the gateway, by the names that it has for them."""

    api_keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allow_plaintext: bool = False
    allow_unauthenticated: bool = False

    def flags(self) -> list[str]:
        """The gateway's flags for what is set."""
        flags: list[str] = []
        for field in fields(self):
            name, value = f"--{field.name.replace('_', '-')}", getattr(self, field.name)
            if value is True:
                flags.append(name)
            elif value:
                flags += [name, str(value)]
        return flags
