"""The command lines of a local cluster's services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.devices import Devices
    from outrider.local import Options


def gateway_flags(options: Options, verifier: str, drafters: Sequence[str]) -> list[str]:
    """What the gateway is told, with the addresses of the others."""
    has_tokenizer = (options.target / "tokenizer.json").exists()
    return [
        *_common(options),
        *_flags(
            verifiers=verifier,
            drafters=",".join(drafters) or None,
            tokenizer=options.target if has_tokenizer else None,
            model_name=options.model_name,
            chat_template=options.chat_template,
        ),
        *options.front_door.flags(),
    ]


def verifier_flags(options: Options, devices: Devices) -> list[str]:
    """What the verifier is told."""
    return [
        *_common(options),
        *_flags(
            dtype=options.dtype,
            model=options.target,
            device=devices.verifier,
            memory_fraction=devices.verifier_memory if options.drafter == "model" else None,
            max_draft_tokens=options.max_draft_tokens,
            verification=options.verification,
            num_candidates=options.num_candidates,
            # A drafter that never rests would take the target's time.
            drafting="turns" if devices.verifier in devices.drafters else None,
            max_running=options.max_running,
            max_model_len=options.max_model_len,
        ),
    ]


def drafter_flags(options: Options, devices: Devices, number: int) -> list[str]:
    """What a drafter is told, counted from 0."""
    flags = [*_common(options), "--kind", options.drafter]
    if options.drafter == "scripted":
        flags += _flags(script=options.script)
    if options.drafter == "model":
        flags += _flags(
            dtype=options.dtype,
            model=options.draft,
            device=devices.drafters[number],
            memory_fraction=devices.drafter_memory(number),
            graph_draft_tokens=options.max_draft_tokens,
            num_candidates=options.num_candidates,
            max_model_len=options.max_model_len,
        )
    return flags


def _common(options: Options) -> list[str]:
    return _flags(log_level=options.log_level, log_format=options.log_format, drain_seconds=options.drain_seconds)


def _flags(**settings: Any) -> list[str]:
    """Flags of the settings, by the services' own names for them; none for those that are None."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
