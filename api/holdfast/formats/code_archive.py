"""A folder of code as a package: a zip file of the same bytes for the same files, wherever and
whenever it is made.

Left out is what `.gitignore` and `.holdfastignore` name (in the folder and below, in git's own
syntax), and what never belongs in: version control, caches, virtual environments.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

PREFIX = "sha256:"
MOST_BYTES = 32 << 20
"""Of a package; a server may allow fewer."""
MOST_UNPACKED_BYTES = 20 * MOST_BYTES
NEVER = (
    ".git/",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    "venv/",
    "node_modules/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".pytest_cache/",
    ".ipynb_checkpoints/",
    ".DS_Store",
)
IGNORE_FILES = (".gitignore", ".holdfastignore")
_LARGEST_NAMED = 5
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can tell
_MODE = 0o644


class CodeUnusable(HoldfastError):
    """The folder cannot be sent along."""

    code = "unusable_code"
    status = 400


def packed(folder: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The package of `folder`. Raises CodeUnusable, which names the largest files if it is too
    large."""
    if not folder.is_dir():
        raise CodeUnusable(f"code: {folder} is no folder")
    files = sorted(_files(folder), key=lambda one: one.relative_to(folder).as_posix())
    if not files:
        raise CodeUnusable(f"code: there is nothing in {folder} but what is ignored")
    try:
        if sum(file.stat().st_size for file in files) > MOST_UNPACKED_BYTES:
            raise _too_large(folder, files, MOST_UNPACKED_BYTES, "before it is packed")
        content = _zipped(folder, files)
    except OSError as error:
        raise CodeUnusable(f"code: {error.filename}: {error.strerror}") from error
    if len(content) > most_bytes:
        raise _too_large(folder, files, most_bytes, "when packed")
    return content


def named(spec: Mapping[str, Any] | BaseModel) -> Path | None:
    """The folder that a spec names as its code, unless it names a package or nothing."""
    given = spec.get("code") if isinstance(spec, Mapping) else None
    return Path(given) if isinstance(given, str) and not given.startswith(PREFIX) else None


def naming(spec: Mapping[str, Any] | BaseModel, package: str) -> dict[str, Any]:
    """The spec with a package instead of the folder."""
    assert isinstance(spec, Mapping)
    return {**spec, "code": package}


def _zipped(folder: Path, files: list[Path]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _TIME)
            entry.external_attr = (0o100000 | _MODE) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            package.writestr(entry, path.read_bytes())
    return target.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    rules = [(folder, _spec(NEVER))]
    yield from _below(folder, rules)


def _spec(lines: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # late: few submissions bring code

    return GitIgnoreSpec.from_lines(lines)


def _below(folder: Path, rules: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[Path]:
    lines = [
        line
        for name in IGNORE_FILES
        if (folder / name).is_file()
        for line in (folder / name).read_text(errors="replace").splitlines()
    ]
    if lines:
        rules = [*rules, (folder, _spec(lines))]
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if any(
                spec.match_file(path.relative_to(base).as_posix() + ("/" if is_folder else ""))
                for base, spec in rules
            ):
                continue
            if is_folder:
                yield from _below(path, rules)
            elif entry.is_file():  # of a link, what it leads to
                yield path


def _too_large(folder: Path, files: list[Path], most_bytes: int, when: str) -> CodeUnusable:
    largest = sorted(files, key=lambda one: -one.stat().st_size)[:_LARGEST_NAMED]
    named = ", ".join(
        f"{item.relative_to(folder)} ({item.stat().st_size / 2**20:.1f} MiB)" for item in largest
    )
    return CodeUnusable(
        f"code: {folder} is larger than {most_bytes / 2**20:.0f} MiB {when}. Leave out what "
        f"training does not need by a .holdfastignore file; the largest are {named}"
    )
