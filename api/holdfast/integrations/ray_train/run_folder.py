"""The folder of a run: its checkpoints, and the list of those that are complete.

    <storage_path>/<name>/checkpoint_000012/   a checkpoint, of the parts of all ranks
    <storage_path>/<name>/.incoming-3-13/      parts of attempt 3 that are being written
    <storage_path>/<name>/.ready-1f0c2a9b/     a checkpoint that is about to get the name of another
    <storage_path>/<name>/checkpoints.json     the complete checkpoints, oldest first
    <storage_path>/<name>/result.json          written when the function has returned

A checkpoint counts once the list names it, when its folder is complete. Only then is the one that
has its name so far touched: a run that is killed at any moment has a complete checkpoint. Every
rank writes its part; rank 0 alone does the rest. All ranks must see the same folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.integrations.ray_train.errors import StorageUnusable

LIST_NAME = "checkpoints.json"
RESULT_NAME = "result.json"
_INCOMING = ".incoming-"
_READY = ".ready-"
_REPLACED = ".replaced-"
_MARK = ".shared-"
_OF_ENDED_ATTEMPTS = (_INCOMING, _READY, _REPLACED, _MARK)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A complete checkpoint. `index`: the number of the `report` that brought it, from 1."""

    index: int
    path: str
    metrics: dict[str, Any]
    moves_to: str = ""
    """The name that its folder is about to get; "" if it has its name."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept, as `CheckpointConfig` says. `most` None: all."""

    most: int | None = None
    attribute: str | None = None
    order: str = "max"

    def kept(self, saved: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """The best ones, or without an attribute the newest; always the newest, from which a run
        is resumed. In the order of `saved`, which is by index."""
        if self.most is None or len(saved) <= self.most:
            return list(saved)
        best = sorted(saved, key=self._rank, reverse=True)[: self.most]
        return [each for each in saved if each in best or each is saved[-1]]

    def _rank(self, checkpoint: KeptCheckpoint) -> tuple[bool, float, int]:
        score = checkpoint.metrics.get(self.attribute) if self.attribute else None
        if isinstance(score, bool) or not isinstance(score, int | float) or math.isnan(score):
            return (False, 0.0, checkpoint.index)
        return (True, score if self.order == "max" else -score, checkpoint.index)


class RunFolder:
    """One rank's view of the folder."""

    def __init__(self, path: Path, attempt: int, retention: Retention) -> None:
        self.path = path
        self._attempt = attempt
        self._retention = retention
        self.saved: tuple[KeptCheckpoint, ...] = ()
        """The complete checkpoints, oldest first, as of the last call."""

    @property
    def newest(self) -> KeptCheckpoint | None:
        return self.saved[-1] if self.saved else None

    def open(self) -> None:
        """Create the folder, read the list, and finish or remove what an ended attempt left. Called
        on rank 0. Raises StorageUnusable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.saved = read_list(self.path)
            for each in self.saved:
                if each.moves_to:
                    self._give_name(each)
            for left in self.path.iterdir():
                if left.name.startswith(_OF_ENDED_ATTEMPTS):
                    shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        except OSError as error:
            raise StorageUnusable(_cannot(self.path, error)) from error

    def mark(self, token: str) -> None:
        """Leave a file by which other ranks see that they share the folder. Called on rank 0."""
        (self.path / f"{_MARK}{token}").touch()

    def unmark(self, token: str) -> None:
        (self.path / f"{_MARK}{token}").unlink(missing_ok=True)

    def is_marked(self, token: str) -> bool:
        return (self.path / f"{_MARK}{token}").exists()

    def incoming(self, index: int) -> Path:
        """The folder for the parts of a checkpoint before it is complete."""
        return self.path / f"{_INCOMING}{self._attempt}-{index}"

    def add_part(self, part: Path, index: int) -> None:
        """Copy a rank's part of a checkpoint. Raises OSError."""
        target = self.incoming(index)
        target.mkdir(exist_ok=True)
        shutil.copytree(part, target, dirs_exist_ok=True)

    def commit(self, index: int, name: str, metrics: dict[str, Any]) -> None:
        """Give a checkpoint its name, so that it counts from now on, and remove the former folder
        of that name. Called on rank 0 once all parts are there. Raises OSError."""
        target = self.path / name
        if not target.exists():
            self.incoming(index).replace(target)
            self._add(KeptCheckpoint(index, str(target), metrics))
            return
        ready = self.path / f"{_READY}{secrets.token_hex(4)}"
        self.incoming(index).replace(ready)
        checkpoint = KeptCheckpoint(index, str(ready), metrics, moves_to=name)
        self._add(checkpoint)
        self._give_name(checkpoint)

    def commit_in_place(self, index: int, path: str, metrics: dict[str, Any]) -> None:
        """Let a checkpoint that stays at `path` count from now on. Called on rank 0. Raises
        OSError."""
        self._add(KeptCheckpoint(index, path, metrics))

    def write_result(self, metrics: Mapping[str, Any], value: object) -> None:
        """Write the last metrics, and the function's value if JSON can express it. Called on rank
        0."""
        document = {"metrics": plain(metrics), "return_value": plain(value)}
        _replace(self.path / RESULT_NAME, json.dumps(document))

    def _add(self, checkpoint: KeptCheckpoint) -> None:
        """Add the checkpoint to the list. It replaces those of its name and those of the same or a
        later report, from an attempt that went on; the retention removes older ones."""
        place = self._place(checkpoint)
        earlier = [
            each
            for each in self.saved
            if each.index < checkpoint.index and self._place(each) != place
        ]
        kept = self._retention.kept([*earlier, checkpoint])
        paths = {each.path for each in kept}
        gone = [each.path for each in self.saved if each.path not in paths]
        self._write(kept)
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)

    def _give_name(self, checkpoint: KeptCheckpoint) -> None:
        """The checkpoint counts already, so what has its name does not. That is moved away: a file
        system that is shared may not remove files that are open somewhere."""
        target = self._place(checkpoint)
        replaced = self.path / f"{_REPLACED}{secrets.token_hex(4)}"
        if target.exists():
            target.replace(replaced)
        Path(checkpoint.path).replace(target)
        named = replace(checkpoint, path=str(target), moves_to="")
        self._write([named if each == checkpoint else each for each in self.saved])
        shutil.rmtree(replaced, ignore_errors=True)

    def _place(self, checkpoint: KeptCheckpoint) -> Path:
        """The folder of the checkpoint once it has its name."""
        return self.path / (checkpoint.moves_to or checkpoint.path)

    def _write(self, saved: Sequence[KeptCheckpoint]) -> None:
        document = {"version": 1, "checkpoints": [self._entry(each) for each in saved]}
        _replace(self.path / LIST_NAME, json.dumps(document))
        self.saved = tuple(saved)

    def _entry(self, checkpoint: KeptCheckpoint) -> dict[str, Any]:
        """The checkpoint as an entry of the list. A path within the folder is relative to it, so
        that the folder can be moved."""
        path = Path(checkpoint.path)
        inside = path.relative_to(self.path) if path.is_relative_to(self.path) else path
        return {**asdict(checkpoint), "path": str(inside)}


def read_list(folder: Path) -> tuple[KeptCheckpoint, ...]:
    """The complete checkpoints of a run, oldest first; () if it has none yet. Raises
    StorageUnusable if the list is damaged."""
    path = folder / LIST_NAME
    try:
        document = json.loads(path.read_text())
        entries = document["checkpoints"]
        return tuple(_listed(folder, each) for each in entries)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageUnusable(
            f"{path} cannot be read ({error}): repair it, or use another storage_path or name"
        ) from error


def _listed(folder: Path, entry: Mapping[str, Any]) -> KeptCheckpoint:
    """A checkpoint that is about to get its name is at one of the two places."""
    path, name = folder / entry["path"], entry.get("moves_to", "")
    if name and not path.exists():
        path, name = folder / name, ""
    return KeptCheckpoint(entry["index"], str(path), entry["metrics"], name)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The content that `write_result` wrote, or None if the function has not returned."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / RESULT_NAME).read_text())
        return found if isinstance(found, dict) else None
    return None


def plain(value: Any) -> Any:
    """`value` as JSON can express it: scalars of numpy and torch as numbers, other objects as
    their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    number = as_number(value)
    return str(value) if number is None else number


def as_number(value: Any) -> float | int | None:
    """A number, also of a scalar of numpy or torch; None for anything else."""
    if isinstance(value, int | float):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        found = value.item()
        return found if isinstance(found, int | float) else None
    return None


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _cannot(path: Path, error: OSError) -> str:
    return (
        f"the folder of the run, {path}, cannot be used: {error.strerror}. Set storage_path to a "
        "folder that all nodes share and the ranks may write"
    )
