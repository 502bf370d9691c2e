"""Every state that files pass through while real code runs, and what a crash may leave of them.

`FolderRecorder` watches the code of the modules it is given, line by line, and keeps what lies in
a folder whenever it has changed: a store into mapped memory, a new file, a truncation, a rename are
seen alike, whichever call made them. Between two states lie those of an operation that was cut
short; `torn` makes them. What a state must still hold is said by whoever drives the code.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Files = dict[str, bytes]


@dataclass(frozen=True)
class Moment:
    """What lay in the folder, the line that was to come next, and what must be had from it."""

    files: Files
    line: str
    must_hold: frozenset[Any]


@dataclass
class FolderRecorder:
    folder: Path
    modules: tuple[ModuleType, ...]
    must_hold: frozenset[Any] = frozenset()
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watched = {module.__file__ for module in self.modules}

    @contextmanager
    def recording(self) -> Iterator[FolderRecorder]:
        self._look("before")
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(None)
        self._look("after")

    def now_holds(self, *what: Any) -> None:
        """From here on a crash must leave `what`."""
        self._look("driver")
        self.must_hold = frozenset(what)
        self._keep(read_files(self.folder), "driver")

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._watched else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._look(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._step

    def _look(self, line: str) -> None:
        files = read_files(self.folder)
        if not self.moments or files != self.moments[-1].files:
            self._keep(files, line)

    def _keep(self, files: Files, line: str) -> None:
        self.moments.append(Moment(files, line, self.must_hold))


def read_files(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def put_files(folder: Path, files: Files) -> None:
    """Make `folder` hold exactly `files`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def torn(before: Moment, after: Moment, random_: random.Random, most: int) -> Iterator[Moment]:
    """States in the middle of the one store that led from `before` to `after`: its first bytes
    only, its last bytes only (a copy need not go upwards), or any of them."""
    changed = [name for name in after.files if before.files.get(name) != after.files[name]]
    if len(changed) != 1 or set(before.files) != set(after.files):
        return  # a new name, a link, a rename, a removal: at once or not at all
    (name,) = changed
    old, new = before.files[name], after.files[name]
    if len(old) != len(new):
        for cut in _cuts(abs(len(new) - len(old)), random_, most):
            length = min(len(old), len(new)) + cut
            yield _with(before, name, (new if len(new) > len(old) else old)[:length], after.line)
        return
    places = [at for at, (one, other) in enumerate(zip(old, new, strict=True)) if one != other]
    for cut in _cuts(len(places), random_, most):
        subsets = (places[:cut], places[cut:], random_.sample(places, cut))
        yield _with(before, name, _mixed(old, new, random_.choice(subsets)), after.line)


def _cuts(length: int, random_: random.Random, most: int) -> list[int]:
    inner = range(1, length)
    if len(inner) <= most:
        return list(inner)
    return sorted({1, length - 1, *random_.sample(inner, most - 2)})


def _mixed(old: bytes, new: bytes, places: list[int]) -> bytes:
    mixed = bytearray(old)
    for at in places:
        mixed[at] = new[at]
    return bytes(mixed)


def _with(moment: Moment, name: str, content: bytes, line: str) -> Moment:
    return Moment({**moment.files, name: content}, f"in the middle of {line}", moment.must_hold)


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
