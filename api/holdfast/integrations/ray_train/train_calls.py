"""The calls of `ray.train` in a rank: `report`, `get_checkpoint`, `get_context`, collectives, ...

All public functions of `ray.train`, `ray.train.torch` and `ray.train.collective` reach one object,
set by `set_train_fn_utils`. This module puts its own there. It is the only one that imports a
private module of Ray Train; `versions.py` says for which versions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from ray.train import Checkpoint
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils
from ray.train.v2.api.context import LocalTrainContext
from ray.train.v2.api.preemption import PreemptionInfo
from ray.train.v2.api.report_config import CheckpointConsistencyMode, CheckpointUploadMode
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus

from holdfast.integrations.ray_train import shard_position
from holdfast.integrations.ray_train.datasets import DatasetShards
from holdfast.integrations.ray_train.errors import NotServed, ReportFailed
from holdfast.integrations.ray_train.memory_checkpoints import MemoryCheckpoints
from holdfast.integrations.ray_train.rank_group import RankGroup
from holdfast.integrations.ray_train.rank_place import WorldPlace
from holdfast.integrations.ray_train.run_folder import (
    RunFolder,
    as_number,
    plain,
)
from holdfast.integrations.ray_train.shard_position import ShardPosition
from holdfast_workers.programs.attachment import Attachment

T = TypeVar("T")
STEP_METRICS = ("loss", "grad_norm", "lr", "tokens")
"""Metrics that a step has itself; all others are the user's own."""


@dataclass(frozen=True)
class _ReportShare:
    """What a rank brings to a `report`."""

    has_part: bool
    """Whether it brings a part that is to be copied."""
    folder: str | None
    """The folder of a checkpoint that is already where it shall stay."""
    name: str | None
    """The folder's name, if the function chose one."""
    should_end: bool
    """Whether the program is asked to end, and does not look for that itself."""
    positions: Mapping[str, ShardPosition]
    """The rank's positions in its shards of datasets."""


class EndWanted(SystemExit):
    """The program was asked to end, and has just saved its state: `report` ends it with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class TrainCalls(LocalTrainFnUtils):  # type: ignore[misc]  # Ray has no types
    """The calls of one rank. All ranks call `report`, `get_preemption_info`, `barrier` and
    `broadcast_from_rank_zero` together; any rank calls the others."""

    def __init__(
        self,
        place: WorldPlace,
        experiment: str,
        attachment: Attachment,
        group: RankGroup,
        folder: RunFolder,
        memory: MemoryCheckpoints,
        shards: DatasetShards,
    ) -> None:
        """`folder`: open, with the same list on all ranks. Takes the newest state from memory or
        storage: called by all ranks at once."""
        super().__init__(
            experiment,
            None,
            place.world_size,
            place.rank,
            place.local_rank,
            place.local_world_size,
            place.node_rank,
        )
        self._context = _RankContext(
            experiment_name=experiment,
            world_size=place.world_size,
            world_rank=place.rank,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node_rank,
        )
        self._context.folder = folder.path
        self._place, self._attachment, self._group = place, attachment, group
        self._folder, self._memory, self._shards = folder, memory, shards
        stored = folder.newest
        taken = memory.take(stored.index if stored else 0)
        self._count = taken.index if taken else stored.index if stored else 0
        self._newest = taken.path if taken else Path(stored.path) if stored else None
        self._looks_for_preemption = False
        self.last_metrics: dict[str, Any] = {}

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
        validation: object = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Show a step, and save the parts of a checkpoint that any of the ranks bring. Returns
        when it is complete in memory and in the run's folder, whatever the upload mode: a rank
        that ends afterwards costs nothing. Raises ReportFailed, NotServed; EndWanted once all
        ranks are asked to end and a checkpoint is complete, unless the function has called
        `get_preemption_info`, and so decides itself."""
        if validation:
            raise NotServed(
                "report(validation=...) is not served by Holdfast: validate in the function, or "
                "the checkpoint afterwards"
            )
        index = self._count + 1
        keeps = checkpoint is not None and checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD
        if checkpoint is not None and checkpoint_upload_fn is not None and not keeps:
            name = checkpoint_dir_name or default_name(index)
            checkpoint, keeps = checkpoint_upload_fn(checkpoint, name), True
        in_place = _local_path(checkpoint) if checkpoint is not None and keeps else None
        offer = _ReportShare(
            has_part=checkpoint is not None and not keeps,
            folder=in_place,
            name=checkpoint_dir_name,
            should_end=self._attachment.should_stop and not self._looks_for_preemption,
            positions=self._shards.positions,
        )
        offers = self._group.gather(offer)
        saves = any(each.has_part or each.folder for each in offers)
        self._show(index, metrics)  # before it is saved: no attempt repeats a step that is
        if saves:
            self._save(index, offers, checkpoint if offer.has_part else None, metrics)
        self._count, self.last_metrics = index, metrics
        if checkpoint is not None and offer.has_part and delete_local_checkpoint_after_upload:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        if saves and all(each.should_end for each in offers):
            raise EndWanted

    @property
    def newest(self) -> Path | None:
        """The folder of the newest complete checkpoint."""
        return self._newest

    def get_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint, of memory or of the run's folder."""
        return Checkpoint(str(self._newest)) if self._newest is not None else None

    def get_all_reported_checkpoints(
        self,
        consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """The checkpoints that the run's folder has, oldest first."""
        committed = ReportedCheckpointStatus.COMMITTED
        return [
            ReportedCheckpoint(Checkpoint(saved.path), saved.metrics, committed)
            for saved in self._folder.saved
        ]

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """This rank's shard. Raises NotServed, FunctionUnusable."""
        return self._shards.of(dataset_info.dataset_name)

    def get_preemption_info(self) -> PreemptionInfo | None:
        """The preemption info once any rank's node is about to go, or the job is asked to stop;
        else None. It has no deadline: Holdfast waits for `program.grace_s` after SIGTERM."""
        self._looks_for_preemption = True
        asked = self._group.gather(self._attachment.should_stop)
        if not any(asked):
            return None
        nodes: dict[str, list[int]] = {}
        for rank, node in enumerate(self._group.gather(self._place.node_rank)):
            if asked[rank]:
                nodes.setdefault(f"node-{node}", []).append(rank)
        return PreemptionInfo(deadline_ms=None, preempted_node_to_ranks=nodes)

    def is_distributed(self) -> bool:
        """False, because True would ask Ray's runtime for the devices of a Ray worker."""
        return False

    def barrier(self) -> None:
        self._group.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return self._group.from_rank_zero(data)

    # --- internals ------------------------------------------------------------------------------

    def _save(
        self,
        index: int,
        offers: list[_ReportShare],
        part: Checkpoint | None,
        metrics: Mapping[str, Any],
    ) -> None:
        name = next((each.name for each in offers if each.name), None) or default_name(index)
        in_place = next((each.folder for each in offers if each.folder), None)
        shards = [each.positions for each in offers]
        record = shard_position.encode(shards) if any(shards) and not self._group.rank else ""
        with ExitStack() as stack:
            with_part = "" if in_place else record
            source = self._agree(index, lambda: self._copy_part(index, part, with_part, stack))
            if any(each.has_part for each in offers):
                self._memory.save(index, source)
        self._agree(index, lambda: self._commit(index, name, in_place, metrics, record))
        self._folder.saved = self._group.from_rank_zero(self._folder.saved)
        self._newest = Path(self._folder.saved[-1].path)
        self._memory.forget()

    def _copy_part(
        self, index: int, part: Checkpoint | None, record: str, stack: ExitStack
    ) -> Path | None:
        """Copy this rank's part, with the positions in datasets that it records, into the run's
        folder; where the part is, or None without one."""
        if part is None and not record:
            return None
        folder = part.as_directory() if part is not None else TemporaryDirectory()
        source = Path(stack.enter_context(folder))
        if record:
            (source / shard_position.FILE_NAME).write_text(record)
        self._folder.add_part(source, index)
        return source

    def _commit(
        self, index: int, name: str, in_place: str | None, metrics: Mapping[str, Any], record: str
    ) -> None:
        """Commit the checkpoint with the metrics of rank 0, to which they belong in Ray Train too.
        Called on rank 0."""
        if self._group.rank:
            return
        if not in_place:
            self._folder.commit(index, name, plain(metrics))
            return
        if record:
            (Path(in_place) / shard_position.FILE_NAME).write_text(record)
        self._folder.commit_in_place(index, in_place, plain(metrics))

    def _agree(self, index: int, work: Callable[[], T]) -> T:
        """Work on all ranks; if one fails, all raise ReportFailed, so that none waits for it."""
        problem, cause, result = "", None, None
        try:
            result = work()
        except Exception as error:
            problem, cause = f"{type(error).__name__}: {error}", error
        problems = self._group.gather(problem)
        failed = {rank: text for rank, text in enumerate(problems) if text}
        if failed:
            shown = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise ReportFailed(
                f"the checkpoint of report {index} could not be saved ({shown}). Look at the free "
                f"space and the permissions of {self._folder.path}; the earlier ones are unchanged"
            ) from cause
        return cast(T, result)

    def _show(self, index: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: as_number(value) for name, value in metrics.items()}
        own = {
            name: float(value)
            for name, value in numbers.items()
            if value is not None and name not in (*STEP_METRICS, "step")
        }
        self._attachment.step(
            index,
            loss=numbers.get("loss"),
            grad_norm=numbers.get("grad_norm"),
            lr=numbers.get("lr"),
            tokens=int(numbers.get("tokens") or 0),
            **own,
        )


class _RankContext(LocalTrainContext):  # type: ignore[misc]  # Ray has no types
    """The attributes of this rank; with the run's folder as its storage."""

    folder: Path

    def get_storage(self) -> StorageContext:
        return StorageContext(
            storage_path=str(self.folder.parent),
            experiment_dir_name=self.folder.name,
            read_only=True,
        )


def default_name(index: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"checkpoint_{index:06d}"


def _local_path(checkpoint: Checkpoint) -> str:
    if checkpoint.filesystem.type_name != "local":
        raise NotServed(
            f"a checkpoint that stays at {checkpoint.path} of {checkpoint.filesystem.type_name} "
            "storage is not served by Holdfast: report a local folder, which is copied into "
            "storage_path"
        )
    return str(checkpoint.path)
