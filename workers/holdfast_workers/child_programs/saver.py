"""Processes that write committed state to the remote tier, so that training never waits for it.

A saver writes one rank's shard from a frozen copy in shared memory, and a record beside it. Once
every rank's record exists, a finalizer publishes the checkpoint (manifest last). A tidier removes
checkpoints that retention no longer keeps; it is separate, because it is slow and may fail. All are
forked from the zygote and end when done.

A record contains the position of every tensor and is copied into the manifest, so it carries its
own digest: the manifest must not vouch for a damaged record.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog

from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    BadCheckpoint,
    checkpoint_folder,
    content_digest,
)
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize as publish
from holdfast_workers.checkpoint.retention import quarantine, retain
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import (
    Storage,
    StorageDenied,
    StorageError,
    StorageOptions,
    TransientStorageError,
    joined,
    write_small,
)
from holdfast_workers.fault_injection.failing_storage import with_injected_failures
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.segment import Segment
from holdfast_workers.spec import RemoteTierSpec

QUARANTINE_REASON = "its job must not use it: see the event checkpoint.bad of this URI"
_log = structlog.get_logger()


def record_name(rank: int) -> str:
    return f"rank-{rank:05d}.record.json"


def save(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Write the shard that the request names; answers `saved` with its size in bytes."""
    rank, step, attempt = request["rank"], request["step"], request["attempt"]
    faults = FaultPoints.from_environment()
    faults.rank = rank
    faults.reach("saver", step)
    segment = Segment.open(Path(request["path"]))
    commit = segment.commits()[0]
    folder = _root(remote).below(checkpoint_folder(step, attempt))
    try:
        record = save_shard(folder, segment.payload(commit), segment.layout, rank, attempt, step)
        # Verified after the last read, so that the written bytes are those of the commit.
        if not segment.verify(commit):
            raise ValueError(f"the copy of step {step} does not match its digest")
        record["metrics"] = request["metrics"]
        write_small(folder, record_name(rank), _sealed(record))
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    control_channel.send(end, {"op": "saved", "rank": rank, "step": step, "nbytes": commit.nbytes})
    return 0


def finalize(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Publish the checkpoint of the request's step; answers `finalized` as soon as it is
    durable."""
    step, attempt = request["step"], request["attempt"]
    FaultPoints.from_environment().reach("finalizer", step)
    folder = _root(remote).below(checkpoint_folder(step, attempt))
    try:
        folder.delete_broken()  # left by killed savers; all shards exist by now
        records = [_record(folder, rank) for rank in range(request["world_size"])]
        # A shard that a partner saved for a lost rank has no metrics; those of all ranks are equal.
        metrics: dict[str, float] = next(
            (record["metrics"] for record in records if record["metrics"]), {}
        )
        extra = {**request["extra"], "metrics": metrics}
        manifest = publish(folder, records, request["mesh"], extra)
        nbytes = sum(folder.objects().values())
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    answer = {"uri": folder.uri, "nbytes": nbytes, "metrics": manifest.metrics}
    control_channel.send(end, {"op": "finalized", **answer})
    return 0


def tidy(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Quarantine the checkpoints that the request names as bad, then apply retention to the
    rest."""
    FaultPoints.from_environment().reach("tidier", request["step"])
    root = _root(remote)
    try:
        _quarantine(root, request["bad"])
        removed = retain(
            root,
            RemoteTierSpec.model_validate(request["rules"]),
            current_attempt=request["attempt"],
            unfinished={(step, attempt) for step, attempt in request["unfinished"]},
        )
    except (TransientStorageError, StorageDenied) as error:
        return _refused(end, error)
    deleted = {joined(root.uri, folder): why for folder, why in removed.items()}
    control_channel.send(end, {"op": "tidied", "deleted": deleted})
    return 0


def _quarantine(root: Storage, uris: Collection[str]) -> None:
    for uri in uris:
        folder = uri.rpartition("/")[2]
        own = uri == joined(root.uri, folder)  # only the job's own checkpoints
        if own and FOLDER_NAME.fullmatch(folder):
            quarantine(root.below(folder), QUARANTINE_REASON)


def _refused(end: socket.socket, error: StorageError) -> int:
    """Answer that the storage refuses the operation for now; the agent may try again."""
    _log.exception("the storage refused an operation")
    control_channel.send(
        end, {"op": "refused", "message": control_channel.shorten_middle(str(error))}
    )
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


def _root(remote: dict[str, Any]) -> Storage:
    """The job's remote tier, as configured by the agent."""
    storage = open_storage(remote["uri"], StorageOptions(**remote["options"]))
    return with_injected_failures(storage, Path(remote["fault_file"]))
