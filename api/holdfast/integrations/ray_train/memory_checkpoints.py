"""Reported checkpoints in the memory of the nodes: saved with each report, taken at a restart.

They come in addition to those in the run's folder. If memory has no room or no whole state, a
warning says so, and the folder's are used.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast.integrations.ray_train.rank_group import RankGroup
from holdfast_workers.errors import WorkersError
from holdfast_workers.program_memory.memory_tier import MemoryTier
from holdfast_workers.programs.attachment import Attachment

_TAKEN = "ray-train-"
_log = structlog.get_logger()


@dataclass(frozen=True)
class TakenCheckpoint:
    """The merged parts of all ranks, of the report `index`, in a folder of this node."""

    index: int
    path: Path


class MemoryCheckpoints:
    """Each call is made by all ranks at once. This class stands for a job without checkpoints in
    memory: the run's folder alone is used."""

    def save(self, index: int, part: Path | None) -> None:
        """Save a rank's part, a folder; None: it has none."""

    def take(self, stored: int) -> TakenCheckpoint | None:
        """The state that memory has, if that is not older than the report `stored`."""
        return None

    def forget(self) -> None:
        """A newer checkpoint is complete: remove the folder of `take`."""


class TierCheckpoints(MemoryCheckpoints):
    """Checkpoints in the segments of Holdfast's node agents. It needs an active attachment."""

    def __init__(self, attachment: Attachment, group: RankGroup, *, is_first_of_node: bool) -> None:
        assert attachment.place is not None
        self._tier = MemoryTier(attachment)
        self._group = group
        self._is_first = is_first_of_node
        self._attempt = attachment.attempt
        self._folder = Path(attachment.place.segment_path).parent
        self._taken: Path | None = None

    def save(self, index: int, part: Path | None) -> None:
        try:
            self._tier.save_folder(index, part)
        except (WorkersError, OSError) as error:
            _log.warning(
                "a reported checkpoint is not kept in memory", report=index, problem=str(error)
            )

    def take(self, stored: int) -> TakenCheckpoint | None:
        if self._is_first:
            for old in self._folder.glob(f"{_TAKEN}*"):  # of earlier attempts
                shutil.rmtree(old, ignore_errors=True)
        newest = self._agreed_newest()
        if newest is None or newest < stored:
            return None
        target = self._folder / f"{_TAKEN}{self._attempt}"
        problem = ""
        try:
            self._tier.load_folder(target)
        except (WorkersError, OSError) as error:
            problem = str(error)
        if problem := next(filter(None, self._group.gather(problem)), ""):
            _log.warning("memory has no whole checkpoint", report=newest, problem=problem)
            return None
        self._taken = target
        return TakenCheckpoint(newest, target)

    def forget(self) -> None:
        if self._taken is not None and self._is_first:
            shutil.rmtree(self._taken, ignore_errors=True)
        self._taken = None

    def _agreed_newest(self) -> int | None:
        """The report that memory has, the same on all ranks; None if any rank lacks it."""
        newest: int | None = None
        try:
            newest = self._tier.newest()
        except WorkersError as error:
            _log.warning("memory has no checkpoint of this rank", problem=str(error))
        all_newest = set(self._group.gather(newest))
        return newest if len(all_newest) == 1 else None
