"""Processes that reach the remote tier: they write committed state, so that training never waits
for it, and load a checkpoint from a bucket into the memory of a rank.

A saver writes one rank's shard from a frozen copy in shared memory, and a record beside it. Once
every rank's record exists, a finalizer publishes the checkpoint (manifest last). A tidier removes
checkpoints that retention no longer keeps; it is separate, because it is slow and may fail. A
loader has the bucket's credentials and runs no users' code. All are forked from a zygote and end
when done.

A record contains the position of every tensor and is copied into the manifest, so it carries its
own digest: the manifest must not vouch for a damaged record.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import structlog

from holdfast_workers.checkpoint.fence_objects import is_newest_epoch
from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    BadCheckpoint,
    checkpoint_folder,
    content_digest,
    list_checkpoints,
)
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize as publish
from holdfast_workers.checkpoint.retention import quarantine, retain
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import (
    Storage,
    StorageDenied,
    StorageError,
    TransientStorageError,
    joined,
    write_small,
)
from holdfast_workers.fault_injection.failing_storage import with_injected_failures
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.segment import Segment
from holdfast_workers.protocol.answers import PublishedCheckpoint
from holdfast_workers.protocol.commands import FinalizeCheckpoint
from holdfast_workers.protocol.processes import (
    FrozenCopy,
    LoadOrder,
    StorageRefusal,
    StorageZygoteConfig,
    TidierJob,
)
from holdfast_workers.protocol.signals import RetentionDone, ShardRecord
from holdfast_workers.worker.remote_loading import fill_shared

QUARANTINE_REASON = "its job must not use it: see the event checkpoint.bad of this URI"
_log = structlog.get_logger()


def record_name(rank: int) -> str:
    return f"rank-{rank:05d}.record.json"


def save(end: socket.socket, copy: FrozenCopy, config: StorageZygoteConfig) -> int:
    """Write the shard of a frozen copy; answers its `ShardRecord`."""
    rank, step, attempt = copy.rank, copy.step, copy.attempt
    faults = FaultPoints.from_environment()
    faults.rank = rank
    faults.reach("saver", step)
    segment = Segment.open(Path(copy.path))
    commit = segment.commits()[0]
    folder = _root(config).below(checkpoint_folder(step, attempt))
    try:
        record = save_shard(folder, segment.payload(commit), segment.layout, rank, attempt, step)
        # Verified after the last read, so that the written bytes are those of the commit.
        if not segment.verify(commit):
            raise ValueError(f"the copy of step {step} does not match its digest")
        record["metrics"] = copy.metrics
        write_small(folder, record_name(rank), _sealed(record))
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    control_channel.send(end, ShardRecord(rank, step, attempt, commit.nbytes))
    return 0


def finalize(end: socket.socket, command: FinalizeCheckpoint, config: StorageZygoteConfig) -> int:
    """Publish the checkpoint of the command's step; answers as soon as it is durable."""
    step, attempt = command.step, command.attempt
    mesh = command.mesh or config.plan.mesh
    FaultPoints.from_environment().reach("finalizer", step)
    folder = _root(config).below(checkpoint_folder(step, attempt))
    try:
        folder.delete_broken()  # left by killed savers; all shards exist by now
        records = [_record(folder, rank) for rank in range(prod(mesh.values()))]
        # A shard that a partner saved for a lost rank has no metrics; those of all ranks are equal.
        metrics: dict[str, float] = next(
            (record["metrics"] for record in records if record["metrics"]), {}
        )
        training = config.plan.spec.model_dump(mode="json")
        extra = {"job": config.plan.job_id, "training": training, "metrics": metrics}
        manifest = publish(folder, records, mesh, extra)
        nbytes = sum(folder.objects().values())
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    control_channel.send(end, PublishedCheckpoint(folder.uri, nbytes, manifest.metrics))
    return 0


def tidy(end: socket.socket, job: TidierJob, config: StorageZygoteConfig) -> int:
    """Quarantine the checkpoints that are bad or were published too late, then apply retention to
    the rest."""
    command = job.command
    FaultPoints.from_environment().reach("tidier", command.step)
    root = _root(config)
    try:
        _quarantine(root, sorted(command.bad))
        _quarantine_late(root, command.limits)
        removed = retain(
            root,
            config.plan.spec.checkpoint.remote,
            current_attempt=command.attempt,
            unfinished=set(command.unfinished),
            may_remove=lambda: is_newest_epoch(root, job.epoch),
        )
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    deleted = {joined(root.uri, folder): why for folder, why in removed.items()}
    control_channel.send(end, RetentionDone(command.step, deleted))
    return 0


def load(end: socket.socket, order: LoadOrder, config: StorageZygoteConfig) -> int:
    """Carry out the order; answers with its outcome."""
    outcome = fill_shared(order, config.storage, Path(config.storage_fault_file))
    control_channel.send(end, outcome)
    return 0


def _quarantine(root: Storage, uris: Collection[str]) -> None:
    for uri in uris:
        folder = uri.rpartition("/")[2]
        own = uri == joined(root.uri, folder)  # only the job's own checkpoints
        if own and FOLDER_NAME.fullmatch(folder):
            quarantine(root.below(folder), QUARANTINE_REASON)


def _quarantine_late(root: Storage, limits: Mapping[int, int]) -> None:
    for manifest in list_checkpoints(root) if limits else ():
        last = limits.get(manifest.attempt)
        if last is not None and manifest.step > last:
            why = f"published after a later attempt had continued from step {last}"
            quarantine(root.below(manifest.folder), why)


def _refused(end: socket.socket, error: StorageError) -> int:
    """Answer that the storage refuses the operation for now; the agent may try again."""
    _log.exception("the storage refused an operation")
    control_channel.send(end, StorageRefusal(control_channel.shorten_middle(str(error))))
    return 0


def _sealed(record: dict[str, Any]) -> bytes:
    return json.dumps({"digest": content_digest(record), "record": record}).encode()


def _record(folder: Storage, rank: int) -> dict[str, Any]:
    """The record of the rank's saver. Raises ObjectMissing, BadCheckpoint."""
    name = record_name(rank)
    try:
        sealed = json.loads(folder.read(name))
        record: dict[str, Any] = sealed["record"]
        if content_digest(record) == sealed["digest"]:
            return record
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(joined(folder.uri, name), f"damaged: {error}") from error
    raise BadCheckpoint(joined(folder.uri, name), "it does not match its own digest")


def _root(config: StorageZygoteConfig) -> Storage:
    """The job's remote tier, as configured by the agent."""
    storage = open_storage(config.plan.remote_root, config.storage)
    return with_injected_failures(storage, Path(config.storage_fault_file))
