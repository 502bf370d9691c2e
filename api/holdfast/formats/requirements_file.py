"""Reads the requirements file that a spec's `runtime_env.pip` may name on the user's machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from holdfast.errors import HoldfastError


class RequirementsUnusable(HoldfastError, code="unusable_requirements", status=400):
    """The requirements file cannot be sent with the job."""


def file_of_spec(spec: Mapping[str, Any] | BaseModel) -> Path | None:
    """The file that the spec names; None: it lists its requirements, or has none."""
    section = spec.get("runtime_env") if isinstance(spec, Mapping) else None
    given = section.get("pip") if isinstance(section, Mapping) else None
    return Path(given) if isinstance(given, str) else None


def with_requirements(spec: Mapping[str, Any], requirements: list[str]) -> dict[str, Any]:
    """The spec with the requirements in place of the file."""
    return {**spec, "runtime_env": {**spec["runtime_env"], "pip": requirements}}


def read_word(given: str) -> list[str]:
    """The requirements of the file of this name, or else the word itself: a package. Raises
    RequirementsUnusable."""
    is_path = given.endswith(".txt") or Path(given).is_file()
    return read(Path(given)) if is_path else [given]


def read(path: Path) -> list[str]:
    """The requirements of a file, one per line, without comments. Raises RequirementsUnusable."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RequirementsUnusable(f"runtime_env.pip: {path}: {why}") from error
    found = []
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        requirement = line.partition(" #")[0].strip()
        if not requirement or requirement.startswith("#"):
            continue
        if requirement.startswith("-"):
            raise RequirementsUnusable(
                f"runtime_env.pip: {path}:{number}: {requirement!r}: options are set on the nodes "
                "(PIP_INDEX_URL and the like); name the packages themselves"
            )
        found.append(requirement)
    return found
