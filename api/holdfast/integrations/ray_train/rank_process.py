"""One rank of a job with `ray_train`: forms the process group, calls the function, ends."""

from __future__ import annotations

import importlib
import inspect
import os
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.integrations.memory_setting import keeps_in_memory
from holdfast.integrations.ray_train import versions

versions.check(versions.installed())  # before anything of Ray is imported

# ruff: noqa: E402
import ray.train.collective
import ray.train.torch
from ray.train.v2._internal.execution.train_fn_utils import set_train_fn_utils

from holdfast.integrations.ray_train.datasets import DatasetShards, DatasetSource
from holdfast.integrations.ray_train.errors import FunctionUnusable, StorageUnusable
from holdfast.integrations.ray_train.memory_checkpoints import (
    MemoryCheckpoints,
    TierCheckpoints,
)
from holdfast.integrations.ray_train.rank_group import RankGroup
from holdfast.integrations.ray_train.rank_place import (
    WorldPlace,
    cluster_of,
    config_of,
    run_of,
)
from holdfast.integrations.ray_train.run_folder import Retention, RunFolder
from holdfast.integrations.ray_train.train_calls import TrainCalls
from holdfast_workers.programs.attachment import Attachment, attach
from holdfast_workers.spec import RayRunSpec

DEFAULT_STORAGE = Path("~/ray_results")
"""The default of Ray Train."""
DEFAULT_NAME = "ray_train"


def main(arguments: Sequence[str]) -> int:
    """`arguments`: `module:function`. Returns the exit code; raises what the function raises."""
    if len(arguments) != 1:
        raise FunctionUnusable("name one training function: module:function")
    place = WorldPlace.of(os.environ)
    config, options = config_of(), run_of()
    attachment = attach("ray-train")
    function = load(arguments[0])
    _form_group(place, options)
    group = RankGroup(options.timeout_s)
    folder = _open_folder(place, options, attachment, group)
    memory = _memory(place, attachment, group)
    shards = DatasetShards()
    calls = TrainCalls(place, folder.path.name, attachment, group, folder, memory, shards)
    if options.datasets is not None:
        shards.open(_datasets(options, attachment), group, calls.newest)
    set_train_fn_utils(calls)
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(ray.train.torch.get_device())
    value = call(function, config)
    if dist.is_initialized():  # the function may have ended it
        group.barrier()
    if place.rank == 0:
        folder.write_result(calls.last_metrics, value)
    if dist.is_initialized():
        group.barrier()
        dist.destroy_process_group()
    return 0


def load(reference: str) -> Callable[..., Any]:
    """The function `module:attribute`. Raises FunctionUnusable."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise FunctionUnusable(f"{reference!r} is not a function: write module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise  # an import of the module itself
        raise FunctionUnusable(
            f"there is no module {module_name}: ship its folder with the job (code)"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FunctionUnusable(f"{module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionUnusable(f"{reference} is no function but a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Call the function as Ray Train does: with the configuration, if it takes one. Raises
    FunctionUnusable."""
    count = len(inspect.signature(function).parameters)
    if count > 1:
        raise FunctionUnusable(
            f"{getattr(function, '__name__', function)} takes {count} arguments: a training "
            "function takes none, or its configuration"
        )
    return function(config) if count else function()


def _form_group(place: WorldPlace, options: RayRunSpec) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        torch.cuda.set_device(place.local_rank % devices)
    dist.init_process_group(
        options.backend or ("nccl" if devices else "gloo"),
        timeout=timedelta(seconds=options.timeout_s),
    )


def _memory(place: WorldPlace, attachment: Attachment, group: RankGroup) -> MemoryCheckpoints:
    if attachment.active and keeps_in_memory():
        return TierCheckpoints(attachment, group, is_first_of_node=place.local_rank == 0)
    return MemoryCheckpoints()


def _datasets(options: RayRunSpec, attachment: Attachment) -> DatasetSource:
    assert options.datasets is not None
    return DatasetSource(
        make=load(options.datasets),
        reference=options.datasets,
        cluster=cluster_of(),
        job_id=attachment.place.job_id if attachment.place else DEFAULT_NAME,
        free_cpus_s=options.free_cpus_s,
    )


def _open_folder(
    place: WorldPlace, options: RayRunSpec, attachment: Attachment, group: RankGroup
) -> RunFolder:
    """The run's folder, the same on all ranks. Raises StorageUnusable."""
    job = attachment.place.job_id if attachment.place else DEFAULT_NAME
    root = Path(options.storage_path or DEFAULT_STORAGE).expanduser()
    retention = Retention(options.num_to_keep, options.score_attribute, options.score_order)
    folder = RunFolder(root / (options.name or job), attachment.attempt, retention)
    problem: Exception | None = None
    if place.rank == 0:
        try:
            folder.open()
        except StorageUnusable as error:
            problem = error
    problem, folder.saved = group.from_rank_zero((problem, folder.saved))
    if problem is not None:
        raise problem
    if place.has_other_nodes:
        _check_shared(folder, group)
    return folder


def _check_shared(folder: RunFolder, group: RankGroup) -> None:
    token = group.from_rank_zero(secrets.token_hex(8))
    if group.rank == 0:
        folder.mark(token)
    group.barrier()
    found = group.gather(folder.is_marked(token))
    if group.rank == 0:
        folder.unmark(token)
    if not all(found):
        blind = [rank for rank, sees in enumerate(found) if not sees]
        raise StorageUnusable(
            f"ranks {blind} do not see the files that rank 0 writes into {folder.path}: set "
            "storage_path to a folder that all nodes share"
        )
