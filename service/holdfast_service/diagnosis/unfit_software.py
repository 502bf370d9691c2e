"""Says why Holdfast cannot run on a node, from what Python reported there, and what to do. Pure.

A node needs the server's minor version of Python and its Ray, Holdfast, and what Holdfast imports.
The code of Holdfast itself can come from the server (`sends_code`); the rest cannot.

Ray and Python report such a node only as text, which this module alone reads: Ray has no error type
for it, and the traceback of another process is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

OWN_PACKAGES = ("holdfast_workers", "holdfast_service")
MOST_CHARACTERS = 300
_IMPORT_ERROR = re.compile(r"(?:ModuleNotFoundError|ImportError): (.+?)\s*$", re.MULTILINE)
_NOT_LOADED = "failed to import on the worker"
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True)
class SoftwareFault:
    """`what`: its subject, as in the findings of a node. `seen`: what was found on the node."""

    what: str
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen}: {self.advice}"


def cannot_load(error: Exception) -> bool:
    """Whether this error of Ray says that a node cannot import what was to run there."""
    return _NOT_LOADED in str(error)


def import_fault(
    error: str, *, sends_code: bool, requirement_of: Callable[[str], str]
) -> SoftwareFault | None:
    """The fault behind the text of an error of a node; None: no import failed.

    `requirement_of(module)`: what the server has installed for a top-level module, such as
    `structlog==25.1.0`; "": it does not know."""
    found = _IMPORT_ERROR.findall(error)
    if not found:
        return None
    reason = found[-1][:MOST_CHARACTERS]
    missing = _NO_MODULE.search(reason)
    module = missing[1] if missing else ""
    top = module.partition(".")[0]
    if module in OWN_PACKAGES and not sends_code:
        advice = (
            "pip install 'holdfast-train[server]' there, in the server's version, or start the "
            "server with --send-own-code"
        )
        return SoftwareFault("holdfast", f"Holdfast is not installed (no module {module})", advice)
    if top in OWN_PACKAGES or any(name in reason for name in OWN_PACKAGES):
        seen = f"Holdfast cannot be imported ({reason})"
        advice = (
            "remove the package from Ray's folder there, or start Ray there again"
            if sends_code
            else "install the server's version of Holdfast there"
        )
        return SoftwareFault("holdfast", seen, advice)
    if module:
        wanted = requirement_of(top) or top
        advice = f"pip install '{wanted}' there, for the Python that runs Ray"
        return SoftwareFault("packages", f"Holdfast needs the module {module}", advice)
    advice = "install the server's versions of Holdfast's requirements there"
    return SoftwareFault("packages", f"an import of Holdfast failed ({reason})", advice)


def version_fault(here: Mapping[str, str], there: Mapping[str, str]) -> SoftwareFault | None:
    """The first difference between the versions `python` (major and minor) and `ray` of two
    processes; None: they are the same."""
    for name, title in (("python", "Python"), ("ray", "Ray")):
        if here.get(name) != there.get(name):
            seen = f"{title} {there.get(name) or '?'}, the server has {here.get(name) or '?'}"
            return SoftwareFault(name, seen, f"install the server's version of {title} there")
    return None
