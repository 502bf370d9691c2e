"""Collectives, counted where they are called: by torch's FSDP, by our own code, by a user's.

:func:`install` puts a thin wrapper around each collective in the namespace of `torch.distributed`,
once in a worker's life. FSDP2 looks them up there at each call (torch 2.11 to 2.13: under other
names, all of which are wrapped), as do `parallelize/tensor.py` and `training/step_agreement.py`.
What they do and return stays the same. One is *entered* when it is called and *left* when the call
has returned; one with `async_op`, when a later one of its group has. On an accelerator a call
returns when the collective is queued, so there `left` speaks of the queue. Collectives inside of
compiled graphs are not seen.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from holdfast_workers.progress.beacon import Beacon, GroupTrack

WORLD = "world"
OF_THE_WORLD = ("default_pg", "mesh_default")
"""What torch calls its default group, and the one that it makes for an axis as large as the world
where there is CUDA and the default group is gloo's alone."""

KINDS = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "scatter": "scatter",
}
"""Name in `torch.distributed` -> what a beacon calls it. Not every torch has all of them."""

_Collective = Callable[..., Any]


def install(beacon: Beacon) -> None:
    """Count every collective of this process in `beacon` from now on."""
    for name, kind in KINDS.items():
        original = getattr(dist, name, None)
        if original is not None:
            setattr(dist, name, _counted(original, kind.encode(), beacon))


def _counted(original: _Collective, kind: bytes, beacon: Beacon) -> _Collective:
    group_at = list(inspect.signature(original).parameters).index("group")
    known = beacon.tracks.get
    is_compiling = torch.compiler.is_compiling

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # dynamo knows the original
            return original(*args, **kwargs)
        group = kwargs.get("group")
        if group is None and len(args) > group_at:
            group = args[group_at]
        track = known(id(group)) or _meet(beacon, group)
        if track is None:
            return original(*args, **kwargs)
        entered_ns = track.enter(kind)
        work = original(*args, **kwargs)
        if work is None:  # not asynchronous: it is through
            track.leave(entered_ns)
        return work

    return collective


def _meet(beacon: Beacon, group: Any) -> GroupTrack | None:
    """The track of a group that was not met before in this attempt; None for no group at all: torch
    hands a number to who is outside of a new one, and its collectives do nothing there.

    Keeps the group's identity alone: a stray reference to it delays its peers' notice of a death.
    """
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        return None
    track = beacon.track(_name(group))
    if track is not None:
        beacon.tracks[id(group)] = track
        if group is not None:
            weakref.finalize(group, beacon.tracks.pop, id(group), None)
    return track


def _name(group: dist.ProcessGroup | None) -> str:
    """`world`, the axis of a mesh, or what its maker or torch calls it."""
    described = "default_pg" if group is None else group.group_desc
    if described in OF_THE_WORLD:
        return WORLD
    if described == "undefined":
        assert group is not None
        return f"group {group.group_name}"
    return described.removeprefix("mesh_")
