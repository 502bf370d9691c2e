"""The distributions that an installation without extras brings, as installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def with_dependencies(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that satisfy the requirements, and all that they require in turn."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        installed = distribution(requirement.name)
        found[canonicalize_name(requirement.name)] = installed
        for text in installed.requires or ():
            below = Requirement(text)
            if below.marker is None or any(
                below.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(below)
    return found


def base_modules() -> set[str]:
    """The top-level modules of the base dependencies."""
    base = with_dependencies(project()["dependencies"])
    return {
        module
        for module, names in packages_distributions().items()
        if any(canonicalize_name(name) in base for name in names)
    }
