"""What is wrong with settings, in the words of whoever wrote them: by flag, environment variable or key of a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError


def spell(
    flags: Collection[str], environment: Mapping[str, str], prefix: str, path: str | None
) -> Callable[[str], str]:
    """What names a field as it was written: as one of the `flags`, as a variable, else as a key in the file.

    They count in this order. What was written nowhere gets the name of its flag.
    """
    in_file = _keys(path)

    def spelled(field: str) -> str:
        variable = f"{prefix}{field.upper()}"
        if field not in flags:
            if variable in environment:
                return variable
            if field in in_file:
                return f"{field} in {path}"
        return f"--{field.replace('_', '-')}"

    return spelled


def describe(error: ValidationError, fields: Collection[str], spelled: Callable[[str], str], prefix: str) -> str:
    """One line on all that pydantic found; the names of fields in it as they were written."""
    return "; ".join(_describe(item, fields, spelled, prefix) for item in error.errors(include_url=False))


def _describe(item: Any, fields: Collection[str], spelled: Callable[[str], str], prefix: str) -> str:
    message = _without_internals(item)
    names = [str(part) for part in item["loc"]]
    if not names:
        # A rule about several fields, whose message names them as they are in the code.
        known = sorted((field for field in fields if "_" in field), key=len, reverse=True)
        pattern = re.compile(rf"\b(?:{'|'.join(known)})\b|^(?:{'|'.join(fields)})\b")
        return pattern.sub(lambda found: spelled(found[0]), message)
    name = names[0]
    if item["type"] == "missing":
        return f"{spelled(name)} is required; {prefix}{name.upper()} sets it too"
    if item["type"] == "extra_forbidden":
        return f"{'.'.join(names)}: unknown key in the file of --config"
    return f"{spelled(name)}: {message}"


def _without_internals(item: Any) -> str:
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    message = re.sub(r"^(?:Input|String|Value) should (?:be )?", "must be ", item["msg"])
    message = re.sub(r", unable to .*", "", message)
    return f"{message}, is {item['input']!r}"


def _keys(path: str | None) -> Collection[str]:
    if path is None:
        return ()
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8")).keys()
    except (OSError, ValueError):
        return ()
