"""Where the model pair that comes with Outrider lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def bundled_model(role: Literal["target", "draft"]) -> Path:
    """Directory of the bundled target or draft model. Raises FileNotFoundError where there is none."""
    return _directory(role)


def heldout_prompt(min_tokens: int = 150) -> str:
    """The first excerpt of that length from files that the bundled models never saw. Raises FileNotFoundError."""
    snippets = json.loads((_directory("heldout") / "snippets.json").read_text())
    return next(str(snippet["text"]) for snippet in snippets if snippet["num_tokens"] >= min_tokens)


def _directory(name: str) -> Path:
    # A wheel carries the models inside the package; in a checkout they lie beside it.
    for demo in (_PACKAGE / "models" / "demo", _PACKAGE.parent / "models" / "demo"):
        if (demo / name).is_dir():
            return demo / name
    raise FileNotFoundError(f"the bundled {name} directory is not installed")
