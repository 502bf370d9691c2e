"""Dashboards and alerts ask for series and labels that the server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from holdfast.rest.metric_series import SERIES, Kind

DEPLOY = Path(__file__).parents[2] / "deploy"
SELECTED = re.compile(r"\b(holdfast_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
LABELS = {
    name: {*point.labels, *(["le"] if point.kind is Kind.HISTOGRAM else [])}
    for point in SERIES
    for name in point.names
}


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana/holdfast.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_what_there_is(query: str) -> None:
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


def test_alerts_say_what_is_wrong() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    assert all(
        rule["annotations"]["summary"] for group in rules["groups"] for rule in group["rules"]
    )
