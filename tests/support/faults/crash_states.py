"""Records every state that files pass through while real code runs, and derives crash states.

`FolderRecorder` traces the code of given modules line by line and keeps the contents of a folder
whenever they have changed. So it sees stores into mapped memory, new files, truncations and renames
alike, whichever call made them. `torn` generates the states of an operation that was interrupted
between two recorded states. The driver of the code declares what each state must still hold.
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
    """One recorded state: the files, the next line of code, and what must be recoverable."""

    files: Files
    line: str
    must_hold: frozenset[Any]


@dataclass
class FolderRecorder:
    """Records the states of `folder` while the code of `modules` runs."""

    folder: Path
    modules: tuple[ModuleType, ...]
    must_hold: frozenset[Any] = frozenset()
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watched = {module.__file__ for module in self.modules}

    @contextmanager
    def recording(self) -> Iterator[FolderRecorder]:
        self._record_if_changed("before")
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(None)
        self._record_if_changed("after")

    def now_holds(self, *what: Any) -> None:
        """Declare that `what` must survive a crash from now on."""
        self._record_if_changed("driver")
        self.must_hold = frozenset(what)
        self._keep(read_files(self.folder), "driver")

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._watched else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._record_if_changed(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._step

    def _record_if_changed(self, line: str) -> None:
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


def torn(before: Moment, after: Moment, random_: random.Random, max_count: int) -> Iterator[Moment]:
    """States during the one write that led from `before` to `after`: only its first bytes, only its
    last bytes (a copy may run downwards), or any subset of its bytes."""
    changed = [name for name in after.files if before.files.get(name) != after.files[name]]
    if len(changed) != 1 or set(before.files) != set(after.files):
        return  # creation, link, rename and removal are atomic
    (name,) = changed
    old, new = before.files[name], after.files[name]
    if len(old) != len(new):
        for cut in _cuts(abs(len(new) - len(old)), random_, max_count):
            length = min(len(old), len(new)) + cut
            yield _with(before, name, (new if len(new) > len(old) else old)[:length], after.line)
        return
    offsets = [
        at
        for at, (old_byte, new_byte) in enumerate(zip(old, new, strict=True))
        if old_byte != new_byte
    ]
    for cut in _cuts(len(offsets), random_, max_count):
        subsets = (offsets[:cut], offsets[cut:], random_.sample(offsets, cut))
        yield _with(before, name, _mixed(old, new, random_.choice(subsets)), after.line)


def _cuts(length: int, random_: random.Random, max_count: int) -> list[int]:
    inner = range(1, length)
    if len(inner) <= max_count:
        return list(inner)
    return sorted({1, length - 1, *random_.sample(inner, max_count - 2)})


def _mixed(old: bytes, new: bytes, offsets: list[int]) -> bytes:
    mixed = bytearray(old)
    for at in offsets:
        mixed[at] = new[at]
    return bytes(mixed)


def _with(moment: Moment, name: str, content: bytes, line: str) -> Moment:
    return Moment({**moment.files, name: content}, f"during {line}", moment.must_hold)


def flipped(content: bytes, bit: int) -> bytes:
    """`content` with one bit inverted."""
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
