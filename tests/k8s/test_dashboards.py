"""Dashboards and alerts: made of their source, asking for what there is, and saying what they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.dashboards.build import DASHBOARDS, text_of
from tests.exported_metrics import OF_EVERY_PROCESS, exported_names, instruments

K8S = Path(__file__).resolve().parents[2] / "k8s"
FOLDER = K8S / "dashboards"
# What Prometheus and those who configure it add to every series.
TARGET_LABELS = {"job", "instance", "namespace", "pod"}
# Made by Prometheus itself.
OF_PROMETHEUS = {"up"}
NAME = re.compile(r"\b(?:outrider|gen_ai|process)_[a-z0-9_]+")
SELECTION = re.compile(r"\b((?:outrider|gen_ai)_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


def alerts() -> list[dict[str, object]]:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in rules["spec"]["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Every query of the dashboards and of the alerts."""
    panels = [panel for dashboard in DASHBOARDS.values() for panel in dashboard.panels]
    return [query.expression for panel in panels for query in panel.queries] + [str(rule["expr"]) for rule in alerts()]


def test_the_files_are_what_the_source_makes() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(DASHBOARDS)
    for name, dashboard in DASHBOARDS.items():
        assert (FOLDER / f"{name}.json").read_text() == text_of(dashboard), "run `python -m k8s.dashboards.build`"


def test_panels_have_ids_titles_and_places_of_their_own() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)
    for dashboard in DASHBOARDS.values():
        panels = dashboard.to_json()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (place["x"] + x, place["y"] + y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["w"])
            for y in range(place["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert max(x for x, _ in cells) < 24
        assert all(panel.description and panel.queries for panel in dashboard.panels)


def test_all_that_kubernetes_is_told_about_metrics_is_exported() -> None:
    """Catches a dashboard, an alert or an autoscaler that waits for numbers under a name that nobody exports."""
    known = exported_names()
    used: set[str] = set()
    for path in K8S.rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            used |= set(NAME.findall(yaml.safe_dump(document, width=1 << 20))) if document else set()
    for text in expressions():
        used |= set(NAME.findall(text))
    # What prometheus-adapter calls its results, which autoscalers ask for.
    adapter = yaml.safe_load((K8S / "components/autoscaling/prometheus-adapter.yaml").read_text())
    results = {rule["name"]["as"] for rules in adapter.values() for rule in rules}
    assert used - known == results


def test_queries_use_labels_and_values_that_there_are() -> None:
    labels = {
        sample: {name.replace(".", "_"): values for name, values in i.labels.items()}
        for i in instruments()
        for sample in i.sample_names
    }
    num_checked = 0
    for text in expressions():
        for name, matchers in SELECTION.findall(text):
            for label, values in MATCHER.findall(matchers):
                if label in TARGET_LABELS:
                    continue
                assert label in labels[name], f"{name} has no label {label}"
                assert set(values.split("|")) <= set(labels[name][label]), f"{name}: {label} is never {values}"
                num_checked += 1
    assert num_checked > 10


def test_alerts_are_complete() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")  # type: ignore[index]
        assert {"summary", "description"} == set(rule["annotations"])  # type: ignore[call-overload]
        used = set(re.findall(r"\b(?:up|process_\w+|outrider_\w+|gen_ai_\w+)\b", str(rule["expr"])))
        assert used <= exported_names() | OF_PROMETHEUS | OF_EVERY_PROCESS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool checks the rules, and there is none here")
def test_promtool_accepts_the_rules_and_they_say_what_they_should(tmp_path: Path) -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    shutil.copy(FOLDER / "alerts_test.yaml", tmp_path)
    for command in (
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
