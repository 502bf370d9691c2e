"""The folder of a run: its checkpoints, and the list of those that are complete.

    <storage_path>/<name>/checkpoint_000012/   a checkpoint, of the parts of all ranks
    <storage_path>/<name>/.incoming-3-13/      parts of attempt 3 that are being written
    <storage_path>/<name>/checkpoints.json     the complete checkpoints, oldest first
    <storage_path>/<name>/result.json          written when the function has returned

A checkpoint counts once the list names it, and the list is replaced by a rename after the folder's
own. Every rank writes its part; rank 0 alone does the rest. All ranks must see the same folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.integrations.ray_train.errors import StorageUnusable

LIST_NAME = "checkpoints.json"
RESULT_NAME = "result.json"
_INCOMING = ".incoming-"
_MARK = ".shared-"


@dataclass(frozen=True)
class KeptCheckpoint:
    """A complete checkpoint. `index`: the number of the `report` that brought it, from 1."""

    index: int
    path: str
    metrics: dict[str, Any]


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
        """On rank 0: create the folder, read the list, and remove what an ended attempt left.
        Raises StorageUnusable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in (*self.path.glob(f"{_INCOMING}*"), *self.path.glob(f"{_MARK}*")):
                shutil.rmtree(name, ignore_errors=True) if name.is_dir() else name.unlink()
        except OSError as error:
            raise StorageUnusable(_cannot(self.path, error)) from error
        self.saved = read_list(self.path)

    def mark(self, token: str) -> None:
        """On rank 0: leave a file by which other ranks see that they share the folder."""
        (self.path / f"{_MARK}{token}").touch()

    def unmark(self, token: str) -> None:
        (self.path / f"{_MARK}{token}").unlink(missing_ok=True)

    def is_marked(self, token: str) -> bool:
        return (self.path / f"{_MARK}{token}").exists()

    def incoming(self, index: int) -> Path:
        """Where the parts of a checkpoint are written before it is complete."""
        return self.path / f"{_INCOMING}{self._attempt}-{index}"

    def add_part(self, part: Path, index: int) -> None:
        """Copy a rank's part of a checkpoint. Raises OSError."""
        target = self.incoming(index)
        target.mkdir(exist_ok=True)
        shutil.copytree(part, target, dirs_exist_ok=True)

    def place(self, index: int, name: str) -> Path:
        """On rank 0, with all parts there: give the folder its name; it does not count yet.
        Raises OSError."""
        target = self.path / name
        if target.exists():  # of an attempt that ended before it counted, or of a repeated step
            self._write([each for each in self.saved if Path(each.path) != target])
            shutil.rmtree(target)
        self.incoming(index).replace(target)
        return target

    def commit(self, checkpoint: KeptCheckpoint) -> tuple[KeptCheckpoint, ...]:
        """On rank 0: the checkpoint counts from now on; older ones are removed by the retention.
        Those of the same or a later report, from an attempt that went on, are replaced. Returns
        the new list. Raises OSError."""
        earlier = [each for each in self.saved if each.index < checkpoint.index]
        kept = self._retention.kept([*earlier, checkpoint])
        paths = {each.path for each in kept}
        gone = [each.path for each in self.saved if each.path not in paths]
        self._write(kept)
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return self.saved

    def write_result(self, metrics: Mapping[str, Any], value: object) -> None:
        """On rank 0: the last metrics, and the function's value if JSON can express it."""
        document = {"metrics": plain(metrics), "return_value": plain(value)}
        _replace(self.path / RESULT_NAME, json.dumps(document))

    def _write(self, saved: Sequence[KeptCheckpoint]) -> None:
        document = {"version": 1, "checkpoints": [self._entry(each) for each in saved]}
        _replace(self.path / LIST_NAME, json.dumps(document))
        self.saved = tuple(saved)

    def _entry(self, checkpoint: KeptCheckpoint) -> dict[str, Any]:
        """With a path relative to the folder, if it is in it, so that the folder can be moved."""
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
        return tuple(
            KeptCheckpoint(each["index"], str(folder / each["path"]), each["metrics"])
            for each in entries
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageUnusable(
            f"{path} cannot be read ({error}): repair it, or use another storage_path or name"
        ) from error


def read_result(folder: Path) -> dict[str, Any] | None:
    """What `write_result` wrote; None if the function has not returned."""
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
