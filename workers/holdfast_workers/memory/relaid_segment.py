"""Gives a segment another layout, in which objects have other room, without losing its newest step.

The new segment takes the place of the former one only when it contains that step: a process that is
killed at any moment leaves the one or the other. If shared memory cannot hold both, the former one
stays: to remove it would free nothing while a process has it mapped.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from holdfast_workers.memory.segment import Segment
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.object_room import NoRoom, carry_over, differ_in_room

_log = structlog.get_logger()


def relaid(former: Segment, layout: StateLayout) -> Segment:
    """The segment with `layout` in the place of `former`, which stays mapped for its readers.

    Nothing is kept if the layouts differ in more than room. Raises SegmentSpaceError.
    """
    if not differ_in_room(former.layout, layout):
        return Segment.create(former.path, layout)
    _log.info("the state has outgrown its room", path=former.path.name, nbytes=layout.payload_bytes)
    beside = path_beside(former.path)
    segment = Segment.create(beside, layout)
    try:
        _keep_newest(former, segment)
        beside.replace(former.path)
    except BaseException:
        segment.close()
        beside.unlink(missing_ok=True)
        raise
    segment.path = former.path
    return segment


def path_beside(path: Path) -> Path:
    """The path at which this process makes the segment that is to take the place of `path`: by its
    name, the agent finds the file of a process that was killed."""
    return path.with_name(f".{path.name}.beside.{os.getpid()}.new")


def _keep_newest(former: Segment, segment: Segment) -> None:
    for commit in former.commits()[:1]:
        if not former.verify(commit):
            return  # damaged: a digest over it would make it count as whole
        with segment.begin(commit.step) as slot:
            try:
                carry_over(former.slot(commit), former.layout, slot, segment.layout)
            except NoRoom as error:
                _log.warning("a step is not kept", step=commit.step, reason=str(error))
                segment.abandon()
                return
            digest = payload_digest(slot)
        segment.commit(attempt=commit.attempt, step=commit.step, digest=digest)
