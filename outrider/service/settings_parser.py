"""The command line of a service: a flag for each of its settings, in groups, with values that a person can read."""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

_CALLERS = "who may call, and over what"


def make_parser(cls: type[BaseSettings], program: str) -> argparse.ArgumentParser:
    """What it parses holds only the flags that were written, as text but for switches: pydantic checks the values."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [FLAG ...]",
        description=cls.__doc__,
        epilog=f"Each flag is an environment variable too, {cls.model_config['env_prefix']}NAME, and a key of the file "
        "that --config names; the flag counts before the variable, and that before the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for title, name, field in _in_groups(cls):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], name, field)
    return parser


def _in_groups(cls: type[BaseSettings]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Group, name and field of each setting: the service's own first, those that all services have last."""
    owners = [owner for owner in cls.__mro__ if issubclass(owner, BaseSettings) and owner is not BaseSettings]
    seen: set[str] = set()
    callers: list[tuple[str, str, FieldInfo]] = []
    for owner in owners:
        title = owner.__name__.removesuffix("Settings").lower() or "service"
        for name in owner.__annotations__:
            if name in seen or name not in cls.model_fields:
                continue
            seen.add(name)
            field = cls.model_fields[name]
            if name.startswith(("tls_", "allow_")) or name == "api_keys":
                callers.append((_CALLERS, name, field))
            else:
                yield title, name, field
    yield from callers


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    help_text = (field.description or "").replace("%", "%%")
    if field.is_required():
        help_text += " (required)"
    elif field.default is True:
        help_text += " (default: on)"
    elif field.default:
        help_text += f" (default: {field.default})"
    if field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(field.annotation) is tuple:
        group.add_argument(flag, action="append", metavar=_metavar(name, field), help=help_text)
    else:
        group.add_argument(flag, metavar=_metavar(name, field), help=help_text)


def _metavar(name: str, field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "A,B,..."
    if annotation is Path:
        return "DIR" if "directory" in (field.description or "") else "FILE"
    if annotation is float:
        return "SECONDS" if name.endswith("_seconds") else "X"
    if annotation is int:
        return "BYTES" if name.endswith("_bytes") else "N"
    return "HOST:PORT" if name.endswith("listen") else name.rpartition("_")[2].upper()
