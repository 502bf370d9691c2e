"""Counts the collectives that torch's FSDP, Holdfast's own code and the user's code call.

:func:`install` puts a thin wrapper around each collective in the namespace of `torch.distributed`,
once in the life of a worker. FSDP2 looks them up there at each call (torch 2.11 to 2.13: under
other names, all of which are wrapped), as do `parallelize/tensor.py` and
`training/step_agreement.py`. Behaviour and return values stay the same.

A collective is *entered* when it is called and *left* when the call has returned; with `async_op`,
it is left when a later collective of its group has returned. On an accelerator, a call returns when
the collective is queued, so there `left` refers to the queue. Collectives inside compiled graphs
are not counted.
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
WORLD_GROUP_NAMES = ("default_pg", "mesh_default")
"""torch's names for its default group, and for the group that it creates for an axis as large as
the world if CUDA is available and the default group uses only gloo."""

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
"""Name in `torch.distributed` -> kind in the beacon. Not every torch version has all of them."""

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
        if is_compiling():  # dynamo handles the original function
            return original(*args, **kwargs)
        group = kwargs.get("group")
        if group is None and len(args) > group_at:
            group = args[group_at]
        track = known(id(group)) or _track_group(beacon, group)
        if track is None:
            return original(*args, **kwargs)
        entered_ns = track.enter(kind)
        work = original(*args, **kwargs)
        if work is None:  # a synchronous call has completed
            track.leave(entered_ns)
        return work

    return collective


def _track_group(beacon: Beacon, group: Any) -> GroupTrack | None:
    """The track of a group that is new in this attempt; None for a non-member's placeholder.

    torch gives a rank outside a new group a number instead, and its collectives do nothing there.
    Only the group's `id` is kept: a stray reference would delay its peers' notice of a death.
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
    """`world`, the axis of a mesh, or the name that its creator or torch gave it."""
    described = "default_pg" if group is None else group.group_desc
    if described in WORLD_GROUP_NAMES:
        return WORLD
    if described == "undefined":
        assert group is not None
        return f"group {group.group_name}"
    return described.removeprefix("mesh_")
