"""What takes the memory tier's place outside of Holdfast: a folder of checkpoints, or nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast_workers.errors import WorkersError

_STEP = re.compile(r"step-(\d+)")
_METADATA = ".metadata"
"""The file that `FileSystemWriter` writes last."""


class NothingSaved(WorkersError):
    """A checkpoint is loaded that was never kept."""


def newest_in(folder: Path) -> int | None:
    """The newest complete step in `folder`, or None."""
    steps = [
        int(name[1])
        for path in folder.glob("step-*")
        if (name := _STEP.fullmatch(path.name)) and (path / _METADATA).exists()
    ]
    return max(steps, default=None)


class DcpFolder(StorageWriter, StorageReader):
    """`FileSystemWriter` and `FileSystemReader` of one step in one, in `folder/step-<step>`."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / f"step-{step}"
        self._writer = FileSystemWriter(path)
        self._reader = FileSystemReader(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The folder is that of the step; `checkpoint_id` is ignored."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._writer.reset()
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_metadata(self) -> Metadata:
        self._reader.reset()
        return self._reader.read_metadata()

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._of(plan).prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        planned: list[Any] = self._of(plans[0]).prepare_global_plan(plans)
        return planned

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._writer.finish(metadata, results)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return self._reader.read_data(plan, planner)

    def _of(self, plan: SavePlan | LoadPlan) -> Any:
        return self._reader if isinstance(plan, LoadPlan) else self._writer


class NoStorage(StorageWriter, StorageReader, AsyncStager):
    """Keeps nothing, and copies nothing for `async_save`."""

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {}

    def synchronize_staging(self) -> None:
        """Do nothing: nothing is copied."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def read_metadata(self) -> Metadata:
        raise NothingSaved(
            "nothing was kept: Holdfast did not start this process. Load a checkpoint of the "
            "memory tier only if tier.newest() is not None"
        )

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: there is nothing to finish."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        raise NothingSaved("nothing was kept: Holdfast did not start this process")
