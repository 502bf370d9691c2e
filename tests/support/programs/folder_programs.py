"""Programs whose ranks share a node and keep the folders of a framework in memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from tests.support.programs.tier_programs import file_limit

from holdfast.integrations import lightning
from holdfast.integrations.agreed_stop import AgreedStop
from holdfast.integrations.lightning import TrainerMemory
from holdfast.integrations.memory_folders import MemoryFolders
from holdfast.integrations.memory_setting import MEMORY_VARIABLE
from holdfast_workers.errors import WorkersError
from holdfast_workers.programs.attachment import attach

SMALL, LARGE = 1000, 3 << 20
NO_ROOM = 1 << 20
"""Less than a segment, and than a large file."""


def keep(rank: int, steps: dict[int, tuple[int, bool]], every_steps: str = "1") -> list[bool]:
    """Whether each step was kept. `steps`: the size of a rank's file, and whether rank 0 has
    room."""
    folders = _folders(rank, every_steps)
    kept = []
    for step, (nbytes, has_room) in steps.items():
        with file_limit(resource.RLIM_INFINITY if has_room or rank else NO_ROOM):
            kept.append(folders.keep(step, lambda folder: _write(folder, rank, nbytes)))  # noqa: B023
    return kept


def load(rank: int, newer_than: int | None, has_room: bool) -> list[str] | str | None:
    """The names of the files, or of the error. Rank 0 may have no room."""
    folders = _folders(rank)
    with file_limit(resource.RLIM_INFINITY if has_room or rank else NO_ROOM):
        try:
            folder = folders.load(newer_than)
        except WorkersError as error:
            return type(error).__name__
    return None if folder is None else sorted(path.name for path in folder.iterdir())


def keep_checkpoint(rank: int, content: bytes) -> bool:
    """As Lightning saves: rank 0 writes a file."""

    def write(folder: Path) -> None:
        if rank == 0:
            (folder / lightning.CHECKPOINT).write_bytes(content)

    return _folders(rank).keep(10, write)


def resume_trainer(rank: int) -> bytes:
    """What Lightning finds in the path that the callback names."""
    _folders(rank)
    memory = TrainerMemory(attach(), every=10)
    assert Path(memory.ckpt_path).exists()
    memory.setup(None, None, "fit")
    dist.barrier()
    return Path(memory.ckpt_path).read_bytes()


def lightning_callbacks(rank: int, every_steps: str) -> list[str]:
    """The names of the callbacks' classes; of Lightning itself there are the base classes."""
    os.environ[MEMORY_VARIABLE] = every_steps
    os.environ[lightning.EVERY_STEPS_VARIABLE] = "10"
    package, callbacks = ModuleType("pytorch_lightning"), ModuleType("pytorch_lightning.callbacks")
    package.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    callbacks.OnExceptionCheckpoint = type("OnExceptionCheckpoint", (), {})  # type: ignore[attr-defined]
    sys.modules.update({"pytorch_lightning": package, "pytorch_lightning.callbacks": callbacks})
    found = [*lightning.pytorch_lightning_callbacks(), lightning.memory_checkpoints(10)]
    return [type(each).__name__ for each in found]


def _folders(rank: int, every_steps: str = "1") -> MemoryFolders:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), MEMORY_VARIABLE: every_steps})
    return MemoryFolders(attach(), AgreedStop().gather)


def _write(folder: Path, rank: int, nbytes: int) -> None:
    (folder / f"part-{rank}").write_bytes(bytes(nbytes))
