"""What pip is told, and what it answers: pure functions.

A job's packages come on top of those that a node has. What Holdfast, torch and Ray themselves need
stays as it is, so a job can neither break its ranks nor compute with another torch than the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOTS = ("holdfast-train", "ray", "torch")
"""The distributions that no job replaces, with all that they need."""
OWN_EXTRAS = frozenset({"server", "workers"})
"""Of Holdfast: what a node's processes import."""
MAX_LINES = 12
"""Of pip's output, in the text of a failure."""
_CONFLICT = "The conflict is caused by:"
_CONSTRAINED = "The user requested (constraint)"
_NO_HELP = "ResolutionImpossible: for help visit"


def fault_of(requirement: str) -> str | None:
    """What is wrong with a requirement; None: nothing."""
    try:
        Requirement(requirement)
    except InvalidRequirement as error:
        first = str(error).partition("\n")[0]
        return f"{requirement!r} is not a requirement such as 'einops>=0.8': {first}"
    return None


def fixed_versions(installed: Iterable[metadata.Distribution]) -> dict[str, str]:
    """The version of each distribution that a job's packages must leave alone, by its name: the
    `ROOTS` and all that they need. All that are installed if Holdfast is not among them: it is
    there as files only, and says nothing of its needs."""
    found = {str(canonicalize_name(each.name)): each for each in installed}
    if ROOTS[0] not in found:
        return {name: each.version for name, each in sorted(found.items())}
    fixed: dict[str, str] = {}
    waiting: list[str] = [name for name in ROOTS if name in found]
    while waiting:
        name = waiting.pop()
        if name in fixed or name not in found:
            continue
        fixed[name] = found[name].version
        extras = OWN_EXTRAS if name == ROOTS[0] else frozenset({""})
        needs = map(Requirement, found[name].requires or ())
        waiting += [canonicalize_name(need.name) for need in needs if _applies(need, extras)]
    return dict(sorted(fixed.items()))


def _applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)


def pins_of(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The exact requirements that pip would install, from its installation report: sorted, so that
    the same packages have the same digest."""
    pins = []
    for entry in report.get("install", ()):
        about = entry["metadata"]
        if entry.get("is_direct"):
            pins.append(f"{about['name']} @ {entry['download_info']['url']}")
        else:
            pins.append(f"{about['name']}=={about['version']}")
    return tuple(sorted(pins, key=str.lower))


def folder_name(pins: Sequence[str]) -> str:
    """The name of the folder of these packages; it differs between versions of Python."""
    version = f"{sys.implementation.cache_tag}-{sys.platform}"
    digest = hashlib.sha256(json.dumps([version, *pins]).encode())
    return digest.hexdigest()[:32]


def cause_of(output: str) -> str:
    """The part of pip's output that says why it failed: its errors and the conflict that it found,
    else its last lines. Without what may be a password in a URL."""
    lines = [line.strip() for line in output.splitlines()]
    errors, in_conflict = [], False
    for line in lines:
        in_conflict = bool(line) and (in_conflict or line == _CONFLICT)
        if in_conflict or (line.startswith("ERROR:") and _NO_HELP not in line):
            errors.append(line.replace(_CONSTRAINED, "The node keeps"))
    chosen = (errors or list(filter(None, lines)))[-MAX_LINES:]
    return re.sub(r"//[^/\s@]+@", "//***@", "\n".join(chosen))
