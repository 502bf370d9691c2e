"""Joining and leaving the process groups of one attempt.

The ranks of a world rendezvous at a store outside of all ranks, under a prefix that names the
attempt, so a late rank of an older attempt can never join a newer one. An attempt's groups are
torch's default group and the groups that device meshes derive from it. No other code keeps a
reference to a group: a stray reference keeps sockets open, and the peers detect a death late.

A listener of gloo accepts each process that first sends a small number, and each client of the
store may set each key. So a new group is refused if another user of this machine is at the other
end of a connection, or if a rank receives another number than that of the rank it is connected to.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast_workers.errors import WorkersError
from holdfast_workers.tcp_table import Owner, owners_of_others

CONNECT_S = 0.5
"""Deadline of the first connection to the store; each further one may take twice as long."""

ACCEPT_POLL_S = 0.001

MAX_KEPT_GROUPS = 12
"""Limit of groups kept by `leave(keep=True)` before they are released: each failed rendezvous
leaves some more."""

_kept_groups: list[Any] = []

_GLOO_COMPLAINT = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|socket|timed? ?out|TCPStore|store",
    re.IGNORECASE,
)


class ForeignPeer(WorkersError, ConnectionError):
    """A process group is connected to a process that is no rank of it."""


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
    rendezvous; later collectives of this group are bounded by `collective_timeout_s`, or by
    `timeout_s` if that is None. A world of one rank gets no group. Raises torch's errors
    (`DistStoreError`, `DistNetworkError`, `RuntimeError`) if the peers do not arrive in time, and
    within a second if no store listens, and ForeignPeer.
    """
    if world_size == 1:
        return
    with own_peers_only(timeout_s):
        store = PrefixStore(f"attempt/{attempt}", _connect(store_host, store_port, timeout_s))
        form(store, rank, world_size, timedelta(seconds=timeout_s), device)
    check_places()
    if collective_timeout_s is not None:
        set_timeout(collective_timeout_s)


def form(store: Store, rank: int, world_size: int, timeout: timedelta, device: str) -> None:
    """Form the default process group over a store that only this attempt uses."""
    on_cuda = device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=torch.device(device) if on_cuda else None,
    )


@contextmanager
def own_peers_only(patience_s: float) -> Iterator[None]:
    """Around the formation of groups. Raises ForeignPeer if a connection that was made inside leads
    to another user of this machine, or is not accepted there within `patience_s`."""
    before = open_sockets()
    yield
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # All of gloo's connections are accepted sooner or later; of NCCL's that is not known.
    allowed = {Owner.SAME_USER, Owner.UNKNOWN} | ({Owner.NOT_YET} if on_cuda else set())
    deadline = time.monotonic() + (0.0 if on_cuda else patience_s)
    made = [each.inode.removeprefix("socket:[")[:-1] for each in open_sockets() - before]
    while Owner.NOT_YET in (owners := owners_of_others(made)) and time.monotonic() < deadline:
        time.sleep(ACCEPT_POLL_S)
    if not owners <= allowed:
        raise ForeignPeer(
            "another user of this machine connected a process to the process group of the ranks; "
            "no byte of it is used. Look for that process"
        )


def check_places(group: Any = None) -> None:
    """Check that each rank hears from every other one, over gloo's connection of the two, which
    rank it is. All ranks of the group call it. Raises ForeignPeer."""
    group = group or dist.group.WORLD
    if not _has_gloo(group):  # on devices alone, or a template's, which has no other ranks
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    heard, said = torch.empty(size, dtype=torch.int64), torch.full((size,), rank)
    # Not torch.distributed's function, whose calls are counted for the detection of hangs.
    group.alltoall_base(heard, said, [], []).wait()
    if heard.tolist() != [*range(size)]:
        raise ForeignPeer(
            f"rank {rank} of {size} hears the ranks {heard.tolist()} over its connections: another "
            "process changed what the rendezvous store holds"
        )


def _has_gloo(group: Any) -> bool:
    with suppress(RuntimeError):  # it has no backend for the CPU
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    return False


def _connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store. torch repeats a refused connection until its time-out, although no
    store is ever started again on the same port: so its time-out is short, and is repeated only
    while something listens."""
    deadline, patience_s = time.monotonic() + timeout_s, CONNECT_S
    while True:
        patience_s = min(patience_s, max(0.001, deadline - time.monotonic()))
        try:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience_s))
        except dist.DistError:
            if time.monotonic() >= deadline or _is_refused(host, port, patience_s):
                raise
            patience_s *= 2
            continue
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


def _is_refused(host: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def set_timeout(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Make every collective of `group` (None: the default group) fail after `timeout_s`.

    Groups derived from the default group do not inherit its time-out: they have torch's own.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def leave(*, keep: bool = False) -> None:
    """Destroy every process group of this process, including a partially formed one.

    With `keep`, the groups' remains are kept until `release_kept`: gloo takes some 20 ms per group
    to end its threads, and the next attempt should not wait for that. `keep` has no effect once
    CUDA is in use. A process that kept groups must end by `os._exit`: a regular exit while
    gloo's threads are still ending crashes in C++.
    """
    if dist.is_initialized():
        if keep and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if len(_kept_groups) > MAX_KEPT_GROUPS:
                release_kept()
            _kept_groups.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    else:
        # A failed join has incremented torch's group count, and torch names the next group by that
        # count: this rank would wait under another name than its peers (torch 2.13).
        dist.distributed_c10d._world.group_count = 0


def release_kept() -> None:
    """End the groups that `leave` has kept, in a background thread.

    Call it once nothing else refers to those groups: the thread that drops the last reference to a
    group waits for its end.
    """
    global _kept_groups
    dead, _kept_groups = _kept_groups, []
    if dead:
        threading.Thread(target=dead.clear, name="release-groups", daemon=True).start()


class OpenSocket(NamedTuple):
    """A socket of this process. Descriptors are reused; `inode` identifies the socket."""

    descriptor: int
    inode: str


def open_sockets() -> frozenset[OpenSocket]:
    """The sockets of this process; the difference before and after `join` is that join's."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed since it was listed
            continue
        if target.startswith("socket:"):
            sockets.add(OpenSocket(int(entry.name), target))
    return frozenset(sockets)


def disconnect(sockets: frozenset[OpenSocket]) -> int:
    """Shut down reading on the connected ones of `sockets`; return their number.

    Callable from any thread. A collective that blocks on such a socket raises within milliseconds,
    even if its peer is silent: gloo reads the end of the connection and closes it. Writing is not
    shut down, because gloo drops a send that fails with EPIPE without waking its waiter. Listening
    sockets are not shut down, because gloo aborts the process when its listener is.
    """
    count = 0
    for open_socket in sockets:
        try:
            with closing(socket.socket(fileno=os.dup(open_socket.descriptor))) as connection:
                connection.getpeername()
                connection.shutdown(socket.SHUT_RD)
        except OSError:  # closed, listening or not connected: nothing to shut down
            continue
        count += 1
    return count


def abort_device_groups() -> int:
    """Abort the NCCL communicators of all groups of this process; return their number.

    Callable from any thread: a kernel that waits for a silent peer ends. All are aborted as one
    group, because one abort may wait for a kernel that only another abort ends
    (github.com/pytorch/pytorch/issues/119797). The groups are destroyed by `leave`.
    """
    if not dist.is_initialized():
        return 0
    found: list[Any] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has no backend for devices
            backend = group._get_backend(torch.device("cuda"))
            found += [backend] if backend.name() == "nccl" else []
    if found:
        found[0]._group_start()
        for backend in found:
            backend.abort()
        found[0]._group_end()
    return len(found)


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` means that a peer, the store or the network failed, not this rank.

    torch has types for most such errors; gloo's are RuntimeErrors that only their text identifies.
    """
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and _GLOO_COMPLAINT.search(str(error)) is not None
