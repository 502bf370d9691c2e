"""The packages of an image: what pyproject.toml needs at run time, at the versions of the lock.

    packages.py requirements EXTRA...   requirement lines for pip, of the base and of these extras
    packages.py check                   the packages of this Python are those of the lock

`check` accepts a package outside of the lock only if a locked one pins it, as torch pins the
libraries of CUDA. It needs the package `packaging`, `requirements` nothing.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = "holdfast-train"
INSTALLER = ("pip", "setuptools", "wheel")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["requirements"]:
        print("\n".join(requirements(arguments[1:])))
    elif arguments == ["check"]:
        if wrong := sorted(unlocked()):
            sys.exit(f"not as in requirements.lock: {', '.join(wrong)}: add them to the lock")
    else:
        sys.exit(__doc__)


def requirements(extras: list[str]) -> list[str]:
    """Those of the base and of the extras, which may name further ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, seen = list(project["dependencies"]), set()
    waiting = list(extras)
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        if extra not in project["optional-dependencies"]:
            sys.exit(f"pyproject.toml has no extra {extra!r}")
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{OWN}\[([\w,-]+)\]", line)
            if own:
                waiting += own[1].split(",")
            else:
                found.append(line)
    return sorted(set(found))


def unlocked() -> Iterator[str]:
    """Installed packages, with their versions, that neither the lock nor a locked package names."""
    locked = {
        _name(name): version
        for name, _, version in (
            line.partition("==") for line in (ROOT / "requirements.lock").read_text().split()
        )
    }
    installed = {_name(each.name): each for each in distributions()}
    pinned = {}
    for name in locked.keys() & installed.keys():
        pinned |= dict(_pins(installed[name].requires or []))
    for name, each in installed.items():
        public = each.version.partition("+")[0]
        wanted = locked.get(name, pinned.get(name))
        if public != wanted and name not in (OWN, *INSTALLER):
            yield f"{name} {each.version}"


def _pins(requires: list[str]) -> Iterator[tuple[str, str]]:
    """Names and versions of the requirements of the form NAME==VERSION that apply here."""
    from packaging.requirements import Requirement  # late: `requirements` runs without it

    for requirement in map(Requirement, requires):
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        if exact and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            yield _name(requirement.name), exact[0]


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
