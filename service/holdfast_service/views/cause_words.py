"""The words of every cause of a fault. Pure.

Promises: every cause has its words here, and nowhere else; a cause that this version does not know
(a newer supervisor may report it) is named as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_service.policy.causes import Cause


@dataclass(frozen=True)
class CauseWords:
    """Two forms of a cause: `a node was lost`, and `a lost node`."""

    clause: str
    noun: str


CAUSES: Mapping[Cause, CauseWords] = {
    Cause.NODE_LOST: CauseWords("a node was lost", "a lost node"),
    Cause.PREEMPTED: CauseWords("the cluster took away a node or a process", "a preempted node"),
    Cause.NODE_UNWELL: CauseWords(
        "a health probe found a node unfit for training", "an unhealthy node"
    ),
    Cause.AGENT_LOST: CauseWords("an agent was lost", "a lost node agent"),
    Cause.OUT_OF_MEMORY: CauseWords(
        "the kernel killed a process because memory ran out", "a process killed for lack of memory"
    ),
    Cause.WORKER_CRASH: CauseWords("the process of a rank ended unexpectedly", "a worker crash"),
    Cause.CORRUPTION: CauseWords(
        "a rank computed other bits than its replicas", "state that differs between replicas"
    ),
    Cause.HANG: CauseWords("a rank stopped making progress", "a hang"),
    Cause.USER_ERROR: CauseWords(
        "the training program raised an error", "an error in the training program"
    ),
    Cause.BAD_STATE: CauseWords(
        "a saved state could not be loaded", "a saved state that could not be loaded"
    ),
    Cause.NOT_FINITE: CauseWords(
        "the first step after a restore was not finite", "a first step that was not finite"
    ),
    Cause.GUARD: CauseWords(
        "the loss or the gradients were out of bounds", "a loss or gradient out of bounds"
    ),
    Cause.CHECKPOINT_FAILED: CauseWords(
        "a shard of the last checkpoint could not be written",
        "a checkpoint that could not be written",
    ),
    Cause.INTERNAL_ERROR: CauseWords("an internal error of Holdfast occurred", "an internal error"),
    Cause.NO_PROGRESS: CauseWords(
        "an attempt did not reach its first step in time", "an attempt that did not start in time"
    ),
    Cause.STRAGGLER: CauseWords(
        "a rank computed more slowly than its peers", "a rank that computes too slowly"
    ),
    Cause.RESTORE_UNAVAILABLE: CauseWords(
        "the remote storage did not answer during a restore", "a remote tier that did not answer"
    ),
    Cause.DATA_UNAVAILABLE: CauseWords(
        "data of the job did not come to a node in time", "data that did not come in time"
    ),
    Cause.REMOTE_UNAVAILABLE: CauseWords(
        "the remote storage accepted no checkpoint", "a remote tier that accepts no checkpoints"
    ),
    Cause.RESIZE: CauseWords("another mesh was due", "a change of the mesh"),
    Cause.COMMUNICATION: CauseWords(
        "ranks lost their connections, and no process was seen to end", "broken communication"
    ),
}


def cause_words(cause: str) -> CauseWords:
    """The words of a cause; of an unknown one, its own name."""
    if cause in CAUSES:
        return CAUSES[Cause(cause)]
    name = cause.replace("_", " ") or "an unknown fault"
    return CauseWords(name, name)
