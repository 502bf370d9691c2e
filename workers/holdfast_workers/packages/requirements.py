"""Pure functions: the requirements that pip receives, and the reading of its reports.

A job's packages come on top of those that a node has. What Holdfast, torch and Ray themselves need
stays as it is, so a job can neither break its ranks nor compute with another torch than the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
_PASSWORD_IN_URL = re.compile(r"//[^/\s@:]*:[^/\s@]+@")
_USER_IN_URL = re.compile(r"//[^/\s@]+@")
_NO_HELP = "ResolutionImpossible: for help visit"


def fault_of(requirement: str) -> str | None:
    """What is wrong with a requirement; None: nothing."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement as error:
        first = str(error).partition("\n")[0]
        return f"{requirement!r} is not a requirement such as 'einops>=0.8': {first}"
    if parsed.url and _PASSWORD_IN_URL.search(parsed.url):
        return (
            f"the URL of {parsed.name} has a password, which everybody who may read the job would "
            "see: keep it on the nodes (netrc, pip.conf)"
        )
    return None


def distributions_by_name(
    installed: Iterable[metadata.Distribution],
) -> dict[str, metadata.Distribution]:
    """Of several with one name the first, which is the one that is imported. What an interrupted
    pip left behind has no name."""
    found: dict[str, metadata.Distribution] = {}
    for each in installed:
        if each.metadata["Name"]:
            found.setdefault(canonicalize_name(each.metadata["Name"]), each)
    return found


def fixed_versions(found: Mapping[str, metadata.Distribution]) -> dict[str, str]:
    """The version of each distribution that a job's packages must leave alone, by its name: the
    `ROOTS` and all that they need. All that are installed if Holdfast is not among them: it is
    there as files only, and says nothing of its needs."""
    if ROOTS[0] not in found:
        return {name: each.version for name, each in sorted(found.items())}
    fixed: dict[str, str] = {}
    waiting = [name for name in ROOTS if name in found]
    while waiting:
        name = waiting.pop()
        if name in fixed or name not in found:
            continue
        fixed[name] = found[name].version
        extras = OWN_EXTRAS if name == ROOTS[0] else frozenset({""})
        waiting += [need.name for need in _needs(found[name].requires, extras)]
    return dict(sorted(fixed.items()))


def pins_of(
    report: Mapping[str, Any],
    requirements: Iterable[str],
    found: Mapping[str, metadata.Distribution],
) -> tuple[str, ...]:
    """The exact requirements that satisfy the given ones on every node: what pip would install,
    from its installation report, and what this node has of them, but for the fixed versions.
    Sorted, so that the same packages have the same digest."""
    new = {canonicalize_name(entry["metadata"]["name"]): entry for entry in report["install"]}
    fixed = fixed_versions(found)
    pins: dict[str, str] = {}
    waiting = list(map(Requirement, requirements))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        need = waiting.pop()
        name, extras = canonicalize_name(need.name), frozenset({"", *need.extras})
        if (name, extras) in seen or not _applies(need, {""}):
            continue
        seen.add((name, extras))
        if name in new:
            pins[name] = _pin(new[name])
            waiting += _needs(new[name]["metadata"].get("requires_dist"), extras)
        elif name in found and name not in fixed:
            pins[name] = f"{name}=={found[name].version}"
            waiting += _needs(found[name].requires, extras)
    return tuple(pins[name] for name in sorted(pins))


def _needs(texts: Iterable[str] | None, extras: Iterable[str]) -> list[Requirement]:
    """Those that apply here, without their markers."""
    needs = [need for need in map(Requirement, texts or ()) if _applies(need, extras)]
    for need in needs:
        need.marker = None
        need.name = canonicalize_name(need.name)
    return needs


def _applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)


def _pin(entry: Mapping[str, Any]) -> str:
    about, source = entry["metadata"], entry.get("download_info", {})
    if not entry.get("is_direct"):
        return f"{about['name']}=={about['version']}"
    url = source["url"]
    if (version := source.get("vcs_info")) is not None:
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    if source.get("subdirectory"):
        url += f"#subdirectory={source['subdirectory']}"
    return f"{about['name']} @ {url}"


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
    return _USER_IN_URL.sub("//***@", "\n".join(chosen))
