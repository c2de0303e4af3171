"""`python -m k8s.dashboards.build`: writes the dashboards that Grafana imports, NAME.json beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from k8s.dashboards.grafana import Dashboard
from k8s.dashboards.overview import OVERVIEW
from k8s.dashboards.pools import POOLS
from k8s.dashboards.speculation import SPECULATION

DASHBOARDS = {"overview": OVERVIEW, "speculation": SPECULATION, "pools": POOLS}


def text_of(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(dashboard.to_json(), indent=2) + "\n"


def main() -> None:
    """Write all of them."""
    for name, dashboard in DASHBOARDS.items():
        Path(__file__).with_name(f"{name}.json").write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
