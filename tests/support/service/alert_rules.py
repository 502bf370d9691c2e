"""Turns two scrapes of `/metrics`, before and after a cause, into a test of Prometheus' own rule
engine (`promtool test rules`)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

TARGET = {"instance": "holdfast:8642", "job": "holdfast"}
"""The labels that Prometheus gives to each series of a scraped server."""
CAUSE_AT_MIN = 10
"""Minute of the first scrape after the cause."""
STEADY_MIN = 200
"""Minutes that it lasts."""

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape; none: no server answered."""

    samples: Mapping[Key, float] = field(default_factory=dict)
    counters: frozenset[Key] = frozenset()

    @classmethod
    def of(cls, text: str) -> Scrape:
        samples: dict[Key, float] = {}
        counters = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted({**sample.labels, **TARGET}.items())))
                samples[key] = float(sample.value)
                if family.type in ("counter", "histogram"):
                    counters.add(key)
        return cls(samples, frozenset(counters))

    def value(self, name: str, **labels: str) -> float:
        """Sum over the series with these labels; 0 if there is none."""
        wanted = set(labels.items())
        return sum(
            value for (of, own), value in self.samples.items() if of == name and wanted <= set(own)
        )


@dataclass(frozen=True)
class Course:
    """How the series go on after the scrape that follows the cause."""

    repeats: bool = False
    """The cause happens again each minute, so that counters go on growing as they did."""
    per_minute: Mapping[str, float] = field(default_factory=dict)
    """Growth of series that are times, by name."""

    @property
    def grows(self) -> bool:
        return self.repeats or bool(self.per_minute)


def input_series(before: Scrape, after: Scrape, expr: str, course: Course) -> list[dict[str, str]]:
    """The series that `expr` reads, with a value for each minute."""
    keys = {key for key in (*before.samples, *after.samples) if key[0] in expr}
    return [
        {"series": _notation(key), "values": _values(before, after, key, course)}
        for key in sorted(keys)
    ]


def check(
    rules: Path,
    rule: Mapping[str, Any],
    series: list[dict[str, str]],
    labels: Mapping[str, str],
    folder: Path,
    *,
    fires_after_min: int,
) -> None:
    """The alert fires with these labels `fires_after_min` minutes after the cause, and neither
    before the cause nor, if the rule has a longer `for`, at once."""
    of_alert = {**labels, **rule["labels"]}
    expected = {
        "exp_labels": of_alert,
        "exp_annotations": {
            name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: of_alert[found[1]], text)
            for name, text in rule["annotations"].items()
        },
    }
    quiet = [CAUSE_AT_MIN - 1, *([CAUSE_AT_MIN] if "for" in rule else [])]
    fires: tuple[int, list[Any]] = (CAUSE_AT_MIN + fires_after_min, [expected])
    looks = [*((minute, []) for minute in quiet), fires]
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": alerts}
                    for minute, alerts in looks
                ],
            }
        ],
    }
    file = folder / "rules_test.yaml"
    file.write_text(yaml.safe_dump(document, width=10_000))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{file.read_text()}"


def minutes(duration: str) -> int:
    """`30m` or `1h` as minutes."""
    return int(duration[:-1]) * {"m": 1, "h": 60}[duration[-1]]


def _notation(key: Key) -> str:
    name, labels = key
    inner = ", ".join(f'{label}="{_escaped(value)}"' for label, value in labels)
    return f"{name}{{{inner}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _values(before: Scrape, after: Scrape, key: Key, course: Course) -> str:
    old, new = before.samples.get(key), after.samples.get(key)
    first = f"_x{CAUSE_AT_MIN}" if old is None else f"{old:.6f}+0x{CAUSE_AT_MIN - 1}"
    if new is None:
        return f"{first} stale"
    growth = course.per_minute.get(key[0], 0.0)
    if course.repeats and key in after.counters:
        growth = new - (old or 0.0)
    return f"{first} {new:.6f}+{growth:.6f}x{STEADY_MIN}"
