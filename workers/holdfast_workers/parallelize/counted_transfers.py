"""Counts the point-to-point transfers of a pipeline or a ring in the rank's beacon.

A transfer from one rank to a neighbour on an axis counts like a collective of the two. It is
*entered* by a rank while the rank waits for it, and *left* otherwise: so a rank that computes while
a transfer is under way waits for nobody, and one that waits names the rank that has not begun the
transfer. Outside of a worker nothing is counted. On an accelerator torch batches transfers and
gives one work for all, so there they count as begun, and waits for them are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from holdfast_workers.progress.beacon import GroupTrack, current_track

KIND = b"transfer"


def link_name(axis: str, source: int, target: int) -> str:
    """The name of the transfers between two coordinates of an axis, in one direction."""
    return f"{axis} {source}>{target}"


def counted(op: dist.P2POp, link: str) -> dist.P2POp:
    """`op`, whose start and wait are counted as one of the transfers of `link`."""
    track = current_track(link)
    if track is not None:
        # torch chooses the keyword by the function, and knows only its own two.
        is_send = op.op is dist.isend
        op.op = _counted_start(op.op, is_send, track)
    return op


def _counted_start(
    start: Callable[..., Any], is_send: bool, track: GroupTrack
) -> Callable[..., Any]:
    def begin(
        tensor: Any,
        *,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
        group_dst: int | None = None,
    ) -> Any:
        peer = group_dst if group_src is None else group_src
        side = {"group_dst": peer} if is_send else {"group_src": peer}
        number = track.begin_transfer(KIND)
        work = start(tensor, group=group, tag=tag, **side)
        return work if work is None else _CountedWork(work, track, number)

    return begin


class _CountedWork:
    """A started transfer, with the methods that torch's pipelines need."""

    def __init__(self, work: dist.Work, track: GroupTrack, number: int) -> None:
        self._work = work
        self._track = track
        self._number = number

    def wait(self) -> bool:
        """Wait until the transfer has ended. An error leaves the transfer entered."""
        entered_ns = self._track.enter_transfer(self._number)
        done: bool = self._work.wait()
        self._track.leave_transfer(entered_ns)
        return done
