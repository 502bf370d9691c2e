"""The names of the fence's objects in a job's remote storage; `FenceRecord` explains the fence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast_workers.checkpoint.storage import Storage

FENCE_FOLDER = "fence"
_NAME = re.compile(r"epoch-(\d+)(?:\.attempt-(\d+))?")


@dataclass(frozen=True)
class FenceFloor:
    """The highest epoch and attempt in use: a successor takes higher ones."""

    epoch: int = 0
    attempt: int = 0


def epoch_object(epoch: int) -> str:
    return f"epoch-{epoch:08d}"


def attempt_object(epoch: int, attempt: int) -> str:
    return f"{epoch_object(epoch)}.attempt-{attempt:08d}"


def used_numbers(names: Iterable[str]) -> list[FenceFloor]:
    """The epoch and attempt of each name; other names are left out."""
    found = (_NAME.fullmatch(name) for name in names)
    return [FenceFloor(int(name[1]), int(name[2] or 0)) for name in found if name]


def is_newest_epoch(root: Storage, epoch: int) -> bool:
    """Whether no later supervisor of the job with the storage `root` is known. Raises
    StorageError."""
    numbers = used_numbers(root.below(FENCE_FOLDER).objects())
    return all(used.epoch <= epoch for used in numbers)
