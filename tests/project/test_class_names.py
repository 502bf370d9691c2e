"""A class name is used once: the same name never means two things."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("api/holdfast", "service/holdfast_service", "workers/holdfast_workers")


def test_no_class_name_is_used_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert places["JobEnded"], "the search finds classes"
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
