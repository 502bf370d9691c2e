"""Dashboards and alerts query only series and labels that the server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from holdfast.rest.metric_series import SERIES, SeriesKind

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


def test_alerts_have_a_summary() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    assert all(
        rule["annotations"]["summary"] for group in rules["groups"] for rule in group["rules"]
    )
