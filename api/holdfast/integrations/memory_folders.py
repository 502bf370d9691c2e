"""Checkpoints of a framework, which are folders of files, in the memory tier.

A framework writes its checkpoint to a staging folder in the memory of the node; the ranks of a node
share it, and one of them gives it to the tier. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_workers.programs.attachment import Attachment

if TYPE_CHECKING:
    from holdfast.torch import MemoryTier

Gather = Callable[[Any], list[Any]]
"""Returns the object of each rank, by rank; it also makes them wait for each other."""


class MemoryFolders:
    """Inactive outside of Holdfast: no folder, nothing kept, nothing found."""

    def __init__(self, attachment: Attachment, gather: Gather) -> None:
        self._gather = gather
        self._tier: MemoryTier | None = None
        self._room = Path()
        if attachment.place is not None:
            from holdfast.torch import tier

            self._tier = tier()
            self._room = Path(attachment.place.segment_path).parent / "staging"
        self.gives = os.environ.get("LOCAL_RANK", "0") == "0"
        """Whether this rank acts for all ranks of its node."""

    def staging(self, step: int) -> Path | None:
        """An empty folder for the checkpoint of `step`; None: nothing would be kept."""
        if self._tier is None:
            return None
        folder = self._room / f"step-{step}"
        if self.gives:
            shutil.rmtree(self._room, ignore_errors=True)
            folder.mkdir(parents=True)
        self._gather(None)
        return folder

    def keep(self, step: int, folder: Path) -> bool:
        """Keep a staging folder, once every rank has written its files; returns whether it was."""
        if self._tier is None:
            return False
        self._gather(None)
        kept = self._tier.save_folder(step, folder if self.gives else None)
        if self.gives:
            shutil.rmtree(self._room, ignore_errors=True)
        return kept

    def keep_copy(self, step: int, folder: Path) -> bool:
        """Keep a copy of a whole checkpoint on a disk that the nodes may share: a node that sees
        the folder of rank 0 gives nothing."""
        if self._tier is None:
            return False
        if self.gives:  # what `load` left there has been read
            shutil.rmtree(self._room, ignore_errors=True)
        mark, rank = folder / f".{uuid.uuid4().hex}", int(os.environ.get("RANK", "0"))
        if rank == 0:
            mark.touch()
        of_rank_0 = folder / self._gather(mark.name)[0]
        gives = rank == 0 or (self.gives and not of_rank_0.exists() and folder.exists())
        self._gather(None)
        mark.unlink(missing_ok=True)
        return self._tier.save_folder(step, folder if gives else None)

    def load(self, newer_than: int | None) -> Path | None:
        """The folder, now in the memory of this node, of the checkpoint that the attempt starts
        from; None: there is none, or none newer than the step `newer_than`."""
        step = self._tier.newest() if self._tier is not None else None
        if self._tier is None or step is None or (newer_than is not None and step <= newer_than):
            return None
        folder = self.staging(step)
        assert folder is not None
        self._tier.load_folder(folder)
        self._gather(None)
        return folder
