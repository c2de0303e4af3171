"""docs/observability.md says of every instrument what the code says, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.exported_metrics import exported_names
from tests.metric_rows import HEAD, SERVICES, rows

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "observability.md").read_text()


def section(title: str) -> str:
    """The text below a heading of the third level, up to the next heading."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)^##", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"there is no {title}"
    return found[1]


@pytest.mark.parametrize("service", SERVICES)
def test_each_instrument_is_documented_as_it_is(service: str) -> None:
    """Catches a page that is out of date; `python -m tests.metric_rows` prints what belongs there."""
    documented = [line for line in section(service).splitlines() if line.startswith("|")]
    assert documented == [*HEAD, *rows(SERVICES[service])]


def test_the_names_for_users_of_other_engines_exist() -> None:
    found = set(re.findall(r"\b(?:outrider|gen_ai)_[a-z0-9_]+", section("Names that users of vLLM and SGLang know")))
    histograms = {name.removesuffix("_bucket") for name in exported_names() if name.endswith("_bucket")}
    assert len(found) > 15
    assert found <= exported_names() | histograms
