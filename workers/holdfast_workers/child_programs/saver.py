"""Processes that carry committed state to the remote tier, so that training never waits for it.

A saver writes one rank's shard from a frozen copy in shared memory and leaves a record beside
it; once every rank's record is there, a finalizer publishes the checkpoint (manifest last). Apart
from it, because it takes its time and may fail, a tidier removes what retention no longer keeps.
All are forked from the zygote and end when done.

A record says where every tensor lies, so it carries a digest of itself: the manifest made of it
would vouch for whatever it says.
"""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    BadCheckpoint,
    checkpoint_folder,
    content_digest,
)
from holdfast_workers.checkpoint.manifest import finalize as publish
from holdfast_workers.checkpoint.retention import quarantine, retain
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.checkpoint.storage import (
    Storage,
    StorageDenied,
    StorageError,
    StorageOptions,
    StorageUnavailable,
    joined,
    open_storage,
    write_small,
)
from holdfast_workers.fault_injection.failing_storage import failing_as_told
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.segment import Segment
from holdfast_workers.spec import RemoteTierSpec

TOLD_BAD = "its job must not use it: see the event checkpoint.bad of this URI"


def record_name(rank: int) -> str:
    return f"rank-{rank:05d}.record.json"


def save(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Write the shard named in the request; answer `saved` with its size in bytes."""
    rank, step, attempt = request["rank"], request["step"], request["attempt"]
    faults = FaultPoints.from_environment()
    faults.rank = rank
    faults.reach("saver", step)
    segment = Segment.open(Path(request["path"]))
    commit = segment.commits()[0]
    at = _root(remote).below(checkpoint_folder(step, attempt))
    try:
        record = save_shard(at, segment.payload(commit), segment.layout, rank, attempt, step)
        if not segment.verify(commit):  # after the last look: what was written is what it held
            raise ValueError(f"the copy of step {step} does not match its digest")
        record["metrics"] = request["metrics"]
        write_small(at, record_name(rank), _sealed(record))
    except (StorageUnavailable, StorageDenied) as error:
        return _refused(end, error)
    control_channel.send(end, {"op": "saved", "rank": rank, "step": step, "nbytes": commit.nbytes})
    return 0


def finalize(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Publish the checkpoint of the request's step; answer `finalized` as soon as it is durable."""
    step, attempt = request["step"], request["attempt"]
    FaultPoints.from_environment().reach("finalizer", step)
    at = _root(remote).below(checkpoint_folder(step, attempt))
    try:
        at.delete_broken()  # of savers that were killed; all shards are there
        records = [_record(at, rank) for rank in range(request["world_size"])]
        # What a partner saved for a lost rank comes without; all ranks measured the same.
        metrics: dict[str, float] = next((one["metrics"] for one in records if one["metrics"]), {})
        extra = {**request["extra"], "metrics": metrics}
        manifest = publish(at, records, request["mesh"], extra)
        nbytes = sum(at.objects().values())
    except (StorageUnavailable, StorageDenied) as error:
        return _refused(end, error)
    answer = {"uri": at.uri, "nbytes": nbytes, "metrics": manifest.metrics}
    control_channel.send(end, {"op": "finalized", **answer})
    return 0


def tidy(end: socket.socket, request: dict[str, Any], remote: dict[str, Any]) -> int:
    """Put into quarantine what the request names as bad, then apply retention to the rest."""
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
    except (StorageUnavailable, StorageDenied) as error:
        return _refused(end, error)
    deleted = {joined(root.uri, folder): why for folder, why in removed.items()}
    control_channel.send(end, {"op": "tidied", "deleted": deleted})
    return 0


def _quarantine(root: Storage, uris: Collection[str]) -> None:
    for uri in uris:
        folder = uri.rpartition("/")[2]
        if FOLDER_NAME.fullmatch(folder) and uri == joined(root.uri, folder):  # the job's own
            quarantine(root.below(folder), TOLD_BAD)


def _refused(end: socket.socket, error: StorageError) -> int:
    """The storage does not take it now; whoever asked may ask again."""
    traceback.print_exc()
    control_channel.send(end, {"op": "refused", "message": control_channel.shortened(str(error))})
    return 0


def _sealed(record: dict[str, Any]) -> bytes:
    return json.dumps({"digest": content_digest(record), "record": record}).encode()


def _record(at: Storage, rank: int) -> dict[str, Any]:
    """What the rank's saver has left. Raises ObjectMissing, BadCheckpoint."""
    name = record_name(rank)
    try:
        sealed = json.loads(at.read(name))
        record: dict[str, Any] = sealed["record"]
        if content_digest(record) == sealed["digest"]:
            return record
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(joined(at.uri, name), f"damaged: {error}") from error
    raise BadCheckpoint(joined(at.uri, name), "it does not match its own digest")


def _root(remote: dict[str, Any]) -> Storage:
    """The job's remote tier, as its agent is configured."""
    storage = open_storage(remote["uri"], StorageOptions(**remote["options"]))
    return failing_as_told(storage, Path(remote["fault_file"]))
