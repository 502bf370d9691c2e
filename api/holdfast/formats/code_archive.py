"""Packs a folder of code into a zip file: the same files always give the same bytes.

Excluded are the files that match `.gitignore` and `.holdfastignore` (in the folder and below, in
git's syntax), version control, caches and virtual environments.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from holdfast.errors import HoldfastError
from holdfast_workers.byte_sizes import size_of

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

PREFIX = "sha256:"
MAX_BYTES = 32 << 20
"""Size of a package; a server may allow less."""
MAX_UNPACKED_BYTES = 20 * MAX_BYTES
ALWAYS_IGNORED = (
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
_LISTED_FILES = 5
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip file
_MODE = 0o644


class CodeUnusable(HoldfastError, code="unusable_code", status=400):
    """The folder cannot be sent with the job."""


def pack(folder: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The package of `folder`. Raises CodeUnusable, with the largest files if it is too large."""
    if not folder.is_dir():
        raise CodeUnusable(f"code: {folder} is not a folder")
    files = sorted(_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise CodeUnusable(f"code: {folder} contains nothing but ignored files")
    try:
        if sum(file.stat().st_size for file in files) > MAX_UNPACKED_BYTES:
            raise _too_large(folder, files, MAX_UNPACKED_BYTES, "before packing")
        content = _zipped(folder, files)
    except OSError as error:
        raise CodeUnusable(f"code: {error.filename}: {error.strerror}") from error
    if len(content) > max_bytes:
        raise _too_large(folder, files, max_bytes, "after packing")
    return content


def folder_of_spec(spec: Mapping[str, Any] | BaseModel) -> Path | None:
    """The folder in the `code` of a spec; None if it is a package or missing."""
    given = spec.get("code") if isinstance(spec, Mapping) else None
    return Path(given) if isinstance(given, str) and not given.startswith(PREFIX) else None


def with_package(spec: Mapping[str, Any] | BaseModel, package: str) -> dict[str, Any]:
    """The spec with a package in place of the folder."""
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
    rules = [(folder, _spec(ALWAYS_IGNORED))]
    yield from _below(folder, rules)


def _spec(lines: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # late: few submissions contain code

    patterns: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # git passes over a line that is no pattern
            patterns += GitIgnoreSpec.from_lines([line]).patterns
    return GitIgnoreSpec(patterns)


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
        for entry in sorted(entries, key=lambda child: child.name):
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if any(
                spec.match_file(path.relative_to(base).as_posix() + ("/" if is_folder else ""))
                for base, spec in rules
            ):
                continue
            if is_folder:
                yield from _below(path, rules)
            elif entry.is_file():  # for a link: if it points to a file
                yield path


def _too_large(folder: Path, files: list[Path], max_bytes: int, when: str) -> CodeUnusable:
    largest = sorted(files, key=lambda path: -path.stat().st_size)[:_LISTED_FILES]
    listed = ", ".join(
        f"{path.relative_to(folder)} ({size_of(path.stat().st_size)})" for path in largest
    )
    return CodeUnusable(
        f"code: {folder} is larger than {size_of(max_bytes)} {when}. Exclude what "
        f"training does not need with a .holdfastignore file; the largest are {listed}"
    )
