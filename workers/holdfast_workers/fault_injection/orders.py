"""The faults that a node was told to bring about: who does each of them, and that it is done once.

A rank's own are handed to its process, and to the next one of that rank on this node for as long
as they have not fired. The node's agent does its own at once, and with it ends.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection import link_cut
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.fault_injection.kinds import (
    BY_SIGNAL,
    PARTITION_S,
    STORAGE_S,
    FaultKind,
    Injection,
    Victim,
)
from holdfast_workers.ipc.children import Child

ANSWER_S = 0.02


class CannotInject(WorkersError):
    """This node has no way to bring that fault about."""


class FaultOrders:
    """`child_of(rank)`: the process that has the rank, if any. `lose_node()` ends everything that
    runs on this node, `cut_links(seconds)` takes it off the network for so long, None where that is
    not to be had; `show_xid(code)` has its health probe see one. Thread-safe."""

    def __init__(
        self,
        root: Path,
        child_of: Callable[[int], Child | None],
        lose_node: Callable[[], None] | None,
        cut_links: Callable[[float], None] | None,
        show_xid: Callable[[int], None],
    ) -> None:
        self._root = root
        self._child_of = child_of
        self._lose_node = lose_node
        self._cut_links = cut_links
        self._show_xid = show_xid
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._armed: dict[int, Injection] = {}

    def take(self, number: int, fault: Injection) -> None:
        """Bring it about, now or when it is due. The same number again changes nothing.

        Raises CannotInject.
        """
        with self._lock:
            if number in self._taken:
                return
            self._taken.add(number)
        if fault.victim is Victim.RANK:
            self._hand_over(number, fault)
        else:
            self._do(fault)

    def due(self, rank: int) -> list[dict[str, Any]]:
        """What a new process of the rank is to be told."""
        with self._lock:
            return [
                {"number": number, "fault": fault.document()}
                for number, fault in self._armed.items()
                if fault.rank == rank
            ]

    def hand_on(self, rank: int, child: Child) -> None:
        """Tell a process that now has the rank, for what came since it was told what is due."""
        for order in self.due(rank):
            child.send({"op": "inject", **order})

    def fired(self, number: int) -> None:
        with self._lock:
            self._armed.pop(number, None)

    def _hand_over(self, number: int, fault: Injection) -> None:
        assert fault.rank is not None
        child = self._child_of(fault.rank)
        if child is not None and fault.at_once and fault.kind in BY_SIGNAL:
            _signal(child, BY_SIGNAL[fault.kind])
            return
        with self._lock:
            self._armed[number] = fault
        if child is not None:
            child.send({"op": "inject", "number": number, "fault": fault.document()})

    def _do(self, fault: Injection) -> None:
        match fault.kind:
            case FaultKind.AGENT_DEATH:
                _soon(lambda: os.kill(os.getpid(), signal.SIGKILL))
            case FaultKind.NODE_LOSS:
                if self._lose_node is None:
                    raise CannotInject("this node cannot be lost on request: it is no local node")
                _soon(self._go_with_the_node)
            case FaultKind.PARTITION:
                self._cut(PARTITION_S if fault.duration_s is None else fault.duration_s)
            case FaultKind.XID:
                self._show_xid(48 if fault.xid is None else fault.xid)
            case FaultKind.REMOTE_DOWN | FaultKind.DISK_FULL:
                lasts_s = STORAGE_S if fault.duration_s is None else fault.duration_s
                self._fail_storage(fault.kind, time.time() + lasts_s)
            case _:
                raise CannotInject(f"{fault.kind} is no fault of a node")

    def _cut(self, seconds: float) -> None:
        if self._cut_links is None:
            raise CannotInject(
                "no link of this node may be cut: its operator names them in "
                f"{link_cut.VARIABLE}, and `ip` (iproute2) has to be there"
            )
        _soon(partial(self._cut_links, seconds))

    def _go_with_the_node(self) -> None:
        assert self._lose_node is not None
        shutil.rmtree(self._root, ignore_errors=True)
        self._lose_node()

    def _fail_storage(self, kind: FaultKind, until: float) -> None:
        written = self._root / f".{FAULT_FILE}.{os.getpid()}"
        written.write_text(json.dumps({"kind": kind.value, "until": until}))
        written.replace(self._root / FAULT_FILE)


def _soon(deed: Callable[[], None]) -> None:
    """Once the order is answered: who gave it need not wonder."""
    threading.Timer(ANSWER_S, deed).start()


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        return  # it has just died by itself
    child.signal(number)
