"""Checkpoints of a framework, which are folders of files, in the memory tier.

A framework writes its checkpoint to a staging folder in the memory of the node; the ranks of a node
share it, and one of them gives it to the tier. All ranks make the same calls in the same order.

Memory that has no room ends no training: if a rank cannot keep its part, a warning says so once,
and no rank does.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from holdfast.integrations.memory_setting import keeps_in_memory
from holdfast_workers.errors import WorkersError
from holdfast_workers.programs.attachment import Attachment

if TYPE_CHECKING:
    from holdfast.torch import MemoryTier

FULL_BYTES = 1 << 20
"""A file system with less room is full: some writers of files do not say why they fail."""
Gather = Callable[[Any], list[Any]]
"""Returns the object of each rank, by rank; it also makes them wait for each other."""
_log = structlog.get_logger()


class MemoryFolders:
    """Keeps folders in memory. It is inactive outside of Holdfast and in a job without a memory
    tier: then it has no folder, keeps nothing and finds nothing."""

    def __init__(self, attachment: Attachment, gather: Gather) -> None:
        self._gather = gather
        self._tier: MemoryTier | None = None
        self._room = Path()
        self._has_warned = False
        if attachment.place is not None and keeps_in_memory():
            from holdfast.torch import tier

            self._tier = tier()
            self._room = Path(attachment.place.segment_path).parent / "staging"
        self.gives = os.environ.get("LOCAL_RANK", "0") == "0"
        """Whether this rank acts for all ranks of its node."""

    def keep(self, step: int, write: Callable[[Path], object]) -> bool:
        """Keep as `step` what `write` writes into the folder that it gets, empty and shared by the
        node's ranks. Returns whether it was kept, the same on all ranks."""
        tier, folder = self._tier, self._staging(step)
        if tier is None or folder is None:
            return False
        given = folder if self.gives else None
        try:
            return self._together(lambda: write(folder)) and self._together(
                lambda: tier.save_folder(step, given)
            )
        finally:
            self._clear()

    def keep_copy(self, step: int, folder: Path) -> bool:
        """Keep a copy of a whole checkpoint on a disk that the nodes may share: a node that sees
        the folder of rank 0 gives nothing."""
        tier = self._tier
        if tier is None:
            return False
        self._clear()  # what `load` left there has been read
        mark, rank = folder / f".{uuid.uuid4().hex}", int(os.environ.get("RANK", "0"))
        if not self._together(lambda: mark.touch() if rank == 0 else None):
            return False
        of_rank_0 = folder / self._gather(mark.name)[0]
        gives = rank == 0 or (self.gives and not of_rank_0.exists() and folder.exists())
        self._gather(None)
        mark.unlink(missing_ok=True)
        return self._together(lambda: tier.save_folder(step, folder if gives else None))

    def load(self, newer_than: int | None) -> Path | None:
        """The folder, now in the memory of this node, of the checkpoint that the attempt starts
        from. None: there is none, or none newer than the step `newer_than`, or no room for it and
        a step `newer_than`. Raises WorkersError."""
        step = self._tier.newest() if self._tier is not None else None
        if self._tier is None or step is None or (newer_than is not None and step <= newer_than):
            return None
        from holdfast_workers.program_memory.folder_parts import BadFolder

        folder = self._staging(step)
        error: WorkersError | None = None
        try:
            if folder is None:
                raise BadFolder(f"{self._room} has no room for step {step}: see the warning")
            self._tier.load_folder(folder)
        except WorkersError as raised:
            error = raised
        has_no_room = any(self._gather(isinstance(error, BadFolder)))
        if error is not None and has_no_room and newer_than is None:
            from holdfast_workers.program_memory.payload_exchange import StateMissing

            raise StateMissing(f"step {step} in memory cannot be used: {error}") from error
        if error is not None and not has_no_room:
            raise error
        if error is not None:
            self._warn(error)
            self._clear()
        return folder if error is None else None

    def _staging(self, step: int) -> Path | None:
        """An empty folder for the checkpoint of `step`; None: nothing would be kept."""
        if self._tier is None:
            return None
        self._clear()
        folder = self._room / f"step-{step}"
        made = self._together(lambda: folder.mkdir(parents=True) if self.gives else None)
        return folder if made else None

    def _clear(self) -> None:
        if self.gives:
            shutil.rmtree(self._room, ignore_errors=True)

    def _together(self, act: Callable[[], object]) -> bool:
        """Call `act`, and return whether it succeeded on all ranks. It failed if it raised or
        returned False."""
        done = False
        try:
            done = act() is not False
        except Exception as error:
            if not (isinstance(error, (WorkersError, OSError)) or self._is_full()):
                raise
            self._warn(error)
        return all(self._gather(done))

    def _is_full(self) -> bool:
        try:
            found = os.statvfs(self._room.parent)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < FULL_BYTES

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "memory cannot keep a checkpoint; training goes on, and only the first time is "
                "reported",
                problem=f"{type(error).__name__}: {error}",
            )
