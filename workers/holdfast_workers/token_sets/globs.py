"""Globs over folders and over names of objects: `*`, `?` and `[...]` within a part, and `**`.

`**` matches any number of folders, at the end of a glob also all files below. Names that begin
with a dot are matched only by a part that does so, too. Unlike the library `glob`, an unreadable
folder is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path

from holdfast_workers.token_sets.refusals import DataRefused

ANY_FOLDERS = "**"


def literal_prefix(key: str) -> str:
    """The beginning that all names matched by a glob have."""
    return key[: next((at for at, sign in enumerate(key) if sign in "*?["), len(key))]


def pattern_of(key: str) -> re.Pattern[str]:
    """The names that a glob matches, wholly."""
    parts = _parts(key.split("/"))
    folders = r"(?:(?!\.)[^/]+/)*"
    text = "".join(folders if part == ANY_FOLDERS else f"{_part(part)}/" for part in parts)
    return re.compile(text.removesuffix("/"), re.DOTALL)


def matching_files(pattern: Path) -> Iterator[Path]:
    """What the glob matches, except for folders; maybe repeatedly. Raises OSError and
    DataRefused."""
    parts = pattern.parts
    literal = next(at for at, part in enumerate(parts) if has_magic(part))
    folder = Path(*parts[:literal])
    if folder.exists():
        yield from _matching(folder, _parts(list(parts[literal:])), ())


def files_below(folder: Path) -> Iterator[Path]:
    """All files, except for those whose name, or a folder's, begins with a dot or an underscore.
    Raises OSError and DataRefused."""
    for path in _matching(folder, [ANY_FOLDERS, "*"], ()):
        if not any(part.startswith("_") for part in path.relative_to(folder).parts):
            yield path


def _parts(parts: list[str]) -> list[str]:
    return [*parts, "*"] if parts[-1] == ANY_FOLDERS else parts


def _matching(folder: Path, parts: list[str], above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    part, rest = parts[0], parts[1:]
    inside = (*above, _identity(folder, above))
    if part == ANY_FOLDERS:
        yield from _matching(folder, rest, above)
        for entry in _entries(folder, "*"):
            if entry.is_dir():
                yield from _matching(Path(entry), parts, inside)
        return
    for entry in _entries(folder, part):
        if rest and entry.is_dir():
            yield from _matching(Path(entry), rest, inside)
        elif not rest and not entry.is_dir():
            yield Path(entry)


def _entries(folder: Path, part: str) -> list[os.DirEntry[str]]:
    pattern = re.compile(_part(part), re.DOTALL)
    with os.scandir(folder) as entries:
        return [entry for entry in entries if pattern.fullmatch(entry.name)]


def _identity(folder: Path, above: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise DataRefused(
            f"{folder} is a link to a folder that it lies in: remove it, or name the files that "
            "are meant"
        )
    return identity


def _part(part: str) -> str:
    """The regular expression of one part, which matches no slash."""
    hidden = "" if part.startswith(".") else r"(?!\.)"
    try:
        return re.compile(hidden + "".join(map(_sign, _SIGN.findall(part)))).pattern
    except re.error as error:
        raise DataRefused(
            f"{part!r} is no glob ({error}): correct its brackets, or name a folder"
        ) from error


_SIGN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def _sign(sign: str) -> str:
    if sign == "*":
        return "[^/]*"
    if sign == "?":
        return "[^/]"
    if len(sign) == 1:
        return re.escape(sign)
    inner = sign[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]")
    inner = "^" + inner[1:] if inner.startswith("!") else inner.replace("^", r"\^")
    return f"(?!/)[{inner}]"
