"""Processes that carry committed state to the remote tier, so that training never waits for it.

A saver writes one rank's shard from a frozen copy in shared memory and leaves a record beside
it; once every rank's record is there, a finalizer publishes the checkpoint (manifest last) and
removes those that retention no longer keeps. Both are forked from the zygote and end when done.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from holdfast_workers import control
from holdfast_workers.chaos import FaultPoints
from holdfast_workers.checkpoint.manifest import finalize as publish
from holdfast_workers.checkpoint.retention import retain
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.memory.segment import Segment


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.record.json"


def save(end: socket.socket, request: dict[str, Any]) -> int:
    """Write the shard named in the request; answer `saved` with its size in bytes."""
    folder, rank, step = Path(request["folder"]), request["rank"], request["step"]
    faults = FaultPoints.from_environment()
    faults.rank = rank
    faults.reach("saver", step)
    segment = Segment.open(Path(request["path"]))
    commit = segment.commits()[0]
    if not segment.verify(commit):
        raise ValueError(f"the copy of step {step} does not match its digest")
    record = save_shard(
        folder, segment.payload(commit), segment.layout, rank, request["attempt"], step
    )
    _write_atomically(record_path(folder, rank), record)
    control.send(end, {"op": "saved", "rank": rank, "step": step, "nbytes": commit.nbytes})
    return 0


def finalize(end: socket.socket, request: dict[str, Any]) -> int:
    """Publish the checkpoint in the request's folder, then apply retention beside it."""
    folder = Path(request["folder"])
    FaultPoints.from_environment().reach("finalizer", request["step"])
    records = [
        json.loads(record_path(folder, rank).read_text()) for rank in range(request["world_size"])
    ]
    publish(folder, records, request["mesh"], request["extra"])
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    deleted = retain(folder.parent, request["keep"], current_attempt=request["attempt"])
    control.send(
        end, {"op": "finalized", "nbytes": nbytes, "deleted": [str(path) for path in deleted]}
    )
    return 0


def _write_atomically(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
