"""Joining and leaving the process groups of one attempt.

A world meets at a store that lives outside of its ranks, under a prefix that names the attempt,
so a late member of an older attempt can never meet a newer one. All groups of an attempt are
torch's default group and what device meshes derive from it; nobody else keeps a reference, for a
stray one keeps sockets open and delays the peers' notice of a death.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

LEFT_AT_MOST = 12
"""Groups that were left and not buried: each rendezvous that fails leaves some more."""

_left: list[Any] = []

_GLOO_COMPLAINT = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|socket|timed? ?out|TCPStore|store",
    re.IGNORECASE,
)


def join(
    store_host: str,
    store_port: int,
    attempt: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: str,
    collective_timeout_s: float | None = None,
) -> None:
    """Form the default process group of `attempt` with the other ranks.

    Collectives on CPU tensors run on gloo, those on CUDA tensors on NCCL. `timeout_s` bounds the
    rendezvous, and every collective of this group after it, unless `collective_timeout_s` does
    that. In a world of one there is no group. Raises what torch raises (`DistStoreError`,
    `DistNetworkError`, `RuntimeError`) if the peers do not come in time.
    """
    if world_size == 1:
        return
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(store_host, store_port, is_master=False, timeout=timeout)
    on_cuda = device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=PrefixStore(f"attempt/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=torch.device(device) if on_cuda else None,
    )
    if collective_timeout_s is not None:
        limit(collective_timeout_s)


def limit(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Let every collective of `group` (None: the default one) fail by itself after `timeout_s`.

    Groups derived from the default one do not inherit its limit: they have torch's own.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def leave(*, keep: bool = False) -> None:
    """Destroy every process group of this process, also one that was only half made.

    With `keep` what is left of them goes by `bury`: gloo takes some 20 ms per group to end its
    threads, for which nobody should wait who forms the next attempt. Not where there is NCCL. Such
    a process must end by `os._exit`: C++ does not bear it otherwise that they are still ending.
    """
    if dist.is_initialized():
        if keep and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if len(_left) > LEFT_AT_MOST:
                bury()
            _left.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    else:
        # A join that failed has counted its group all the same, and torch names the next one by
        # that count: this rank would wait under another name than its peers (torch 2.13).
        dist.distributed_c10d._world.group_count = 0


def bury() -> None:
    """End what `leave` has kept, in a thread that nobody waits for. To be called once nothing else
    refers to those groups: whoever lets go of one last, waits for it."""
    global _left
    dead, _left = _left, []
    if dead:
        threading.Thread(target=dead.clear, name="bury", daemon=True).start()


class OpenSocket(NamedTuple):
    """A socket of this process. Numbers are used again; `inode` says which socket it is."""

    descriptor: int
    inode: str


def sockets() -> frozenset[OpenSocket]:
    """The sockets of this process; compare before and after `join`."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed since it was listed
            continue
        if target.startswith("socket:"):
            found.add(OpenSocket(int(entry.name), target))
    return frozenset(found)


def cut(those: frozenset[OpenSocket]) -> int:
    """End reading on the connected sockets among `those`; return how many they are.

    May be called from any thread. A collective that blocks on one of them raises within
    milliseconds, even if its peer is silent: gloo reads the end of the connection and closes it.
    Writing is left alone, for gloo drops a send that fails with EPIPE without waking who waits
    for it. Listening sockets are left alone: gloo aborts the process when its own is shut down.
    """
    count = 0
    for one in those:
        try:
            with closing(socket.socket(fileno=os.dup(one.descriptor))) as connection:
                connection.getpeername()
                connection.shutdown(socket.SHUT_RD)
        except OSError:  # closed, listening, or not connected: nothing to cut
            continue
        count += 1
    return count


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception means that a peer, the store or the network failed, not this rank.

    torch has types for most; gloo's own come as a RuntimeError of which only the text tells.
    """
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and _GLOO_COMPLAINT.search(str(error)) is not None
