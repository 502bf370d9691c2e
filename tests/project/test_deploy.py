"""Dashboards and alerts query only series and labels that the server exports; units are valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from holdfast.cli.main import build
from holdfast.rest.monitoring.metric_series import SERIES, SeriesKind

DEPLOY = Path(__file__).parents[2] / "deploy"
SELECTED = re.compile(r"\b(holdfast_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
LABELS = {
    name: {*point.labels, *(["le"] if point.kind is SeriesKind.HISTOGRAM else [])}
    for point in SERIES
    for name in point.names
}


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana/holdfast.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    panel_queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return panel_queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_uses_existing_series_and_labels(query: str) -> None:
    selected = SELECTED.findall(query)
    assert selected
    labels: set[str] = set()
    for name, matchers in selected:
        assert name in LABELS, name
        named = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        assert set(named) <= LABELS[name], name
        labels |= LABELS[name]
    for group in GROUPED.findall(query):
        assert {item.strip() for item in group.split(",")} <= labels


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries())]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def units() -> list[Path]:
    return sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    (start,) = re.findall(r"^ExecStart=/opt/holdfast/bin/holdfast (.+)$", unit.read_text(), re.M)
    words = [word for word in start.replace("${HOLDFAST_HEAD}", "head").split() if word[0] != "$"]
    build().parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name
    text = unit.read_text().replace("/opt/holdfast/bin/holdfast", "/bin/true")
    here.write_text(text.replace("User=holdfast", "User=root"))
    command = ["systemd-analyze", "verify", "--man=no", str(here)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert unit.name not in found.stderr, found.stderr
    assert found.returncode == 0, found.stderr
