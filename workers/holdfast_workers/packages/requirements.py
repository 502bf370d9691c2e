"""Pure functions: the requirements that pip receives, and the reading of its reports.

A job's packages come on top of those that a node has. What Holdfast, torch and Ray themselves need
stays as it is, so a job can neither break its ranks nor compute with another torch than the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from holdfast_workers.errors import WorkersError

ROOTS = ("holdfast-train", "ray", "torch")
"""The distributions that no job replaces, with all that they need."""
OWN_EXTRAS = frozenset({"server", "workers"})
"""The extras of Holdfast that a node's processes import."""
MAX_LINES = 12
"""Lines of pip's output in the text of a failure."""
_CONFLICT = "The conflict is caused by:"
_CONSTRAINED = "The user requested (constraint)"
_USER_IN_URL = re.compile(r"//[^/\s]+@")
_QUERY_IN_URL = re.compile(r"(://[^\s?]+)\?[^\s#]+")
_NO_HELP = "ResolutionImpossible: for help visit"


class UnstablePackage(WorkersError):
    """Nodes that install the same requirement may install different files."""


def fault_of(requirement: str) -> str | None:
    """The fault of a requirement. None if there is none: as a line of a requirements file, it is
    this requirement and nothing else."""
    why = _fault_of_line(requirement)
    if why is not None:
        return f"{requirement!r} is not a requirement such as 'einops>=0.8': {why}"
    url = Requirement(requirement).url
    if url is not None and _has_credentials(url):
        return (
            f"the URL of {requirement.partition('@')[0].strip()!r} has a user or a password, which "
            "everybody who may read the job would see: keep it on the nodes (netrc, pip.conf)"
        )
    return None


def _fault_of_line(text: str) -> str | None:
    """The fault of a requirement as a line, or None: pip would read a text that splits, continues
    or expands a line as something else."""
    if not (text.isascii() and text.isprintable()):
        return "it has a line break or another character than printable ASCII: remove it"
    if "${" in text or "\\" in text:
        return "pip replaces ${NAME} and joins lines that end in a backslash: write the text itself"
    if any(word.startswith("-") for word in text.split()):
        return "options are set on the nodes (PIP_INDEX_URL and the like): remove them"
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return str(error).partition("\n")[0]
    return None


def _has_credentials(url: str) -> bool:
    """The user of SSH is not secret: it is `git` nearly everywhere."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half an address in brackets
        return "@" in url
    return parts.password is not None or (
        parts.username is not None and not parts.scheme.endswith("ssh")
    )


def distributions_by_name(
    installed: Iterable[metadata.Distribution],
) -> dict[str, metadata.Distribution]:
    """The distributions by name; of several with one name the first, which is the one that is
    imported. Folders that an interrupted pip left have no name."""
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
    """The requirements that apply here, without their markers."""
    needs = [need for need in map(Requirement, texts or ()) if _applies(need, extras)]
    for need in needs:
        need.marker = None
        need.name = canonicalize_name(need.name)
    return needs


def _applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)


def _pin(entry: Mapping[str, Any]) -> str:
    """Raises UnstablePackage."""
    about, source = entry["metadata"], entry.get("download_info", {})
    if not entry.get("is_direct"):
        return f"{about['name']}=={about['version']}"
    url, parts = source["url"], []
    if source.get("subdirectory"):
        parts.append(f"subdirectory={source['subdirectory']}")
    if (version := source.get("vcs_info")) is not None:
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    elif (digest := _sha256(source)) is not None:
        parts.append(f"sha256={digest}")
    else:
        raise UnstablePackage(
            f"{about['name']} @ {url}: other nodes cannot check that they get the same: name a "
            "file (a wheel, or an archive of the source) instead of a folder; or put it into the "
            "folder of the job's code"
        )
    return f"{about['name']} @ {url}" + (f"#{'&'.join(parts)}" if parts else "")


def _sha256(source: Mapping[str, Any]) -> str | None:
    """The sha256 of the archive that pip has downloaded, if it is known."""
    archive = source.get("archive_info") or {}
    kind, _, digest = str(archive.get("hash") or "").partition("=")  # of pip before 23.1
    found = archive.get("hashes") or {kind: digest}
    return found.get("sha256")


def cause_of(output: str) -> str:
    """The part of pip's output that says why it failed: its errors and the conflict that it found,
    else its last lines. Of URLs without user, password and query, which may be secret."""
    lines = [line.strip() for line in output.splitlines()]
    errors, in_conflict = [], False
    for line in lines:
        in_conflict = bool(line) and (in_conflict or line == _CONFLICT)
        if in_conflict or (line.startswith("ERROR:") and _NO_HELP not in line):
            errors.append(line.replace(_CONSTRAINED, "The node keeps"))
    chosen = (errors or list(filter(None, lines)))[-MAX_LINES:]
    said = _USER_IN_URL.sub("//***@", "\n".join(chosen))
    return _QUERY_IN_URL.sub(r"\1?***", said)
