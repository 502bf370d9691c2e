"""`make setup` installs exact versions that support every Python version Holdfast supports."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKED = dict(
    line.split("==") for line in (ROOT / "requirements.lock").read_text().split() if line[0] != "#"
)


def oldest_python() -> Version:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r">=([\d.]+)", project["requires-python"])
    assert found
    return Version(f"{found[1]}.0")


@pytest.mark.parametrize("name", LOCKED)
def test_locked_packages_support_the_oldest_supported_python(name: str) -> None:
    installed = distribution(name)
    assert Version(installed.version).public == LOCKED[name]
    has_limit = "Requires-Python" in installed.metadata
    wanted = SpecifierSet(installed.metadata["Requires-Python"] if has_limit else "")
    assert wanted.contains(oldest_python()), f"{name} requires Python {wanted}"
