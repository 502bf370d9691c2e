"""The injected faults of a node: dispatches each to the process that executes it, exactly once.

A fault of a rank is sent to the rank's process, and to every later process of that rank on this
node until the fault has fired. The agent executes faults of the node itself at once.
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

from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection import link_cut
from holdfast_workers.fault_injection.connection_reset import reset_connections
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.fault_injection.kinds import (
    PARTITION_S,
    SIGNALS,
    STORAGE_S,
    FaultKind,
    Injection,
    Victim,
)
from holdfast_workers.ipc.children import Child
from holdfast_workers.protocol.processes import ArmFault

ACTION_DELAY_S = 0.02


class CannotInject(WorkersError):
    """This node cannot execute the requested fault."""


class FaultOrders:
    """Dispatches the faults of one node. Thread-safe.

    `child_of(rank)` is the process of the rank, if any. `lose_node()` ends everything that runs on
    this node, `cut_links(seconds)` disconnects it for that time; None if the node cannot do that.
    `show_xid(code)` makes its health probe report an XID; `data_port()` is the node's.
    """

    def __init__(
        self,
        root: Path,
        child_of: Callable[[int], Child | None],
        lose_node: Callable[[], None] | None,
        cut_links: Callable[[float], None] | None,
        show_xid: Callable[[int], None],
        data_port: Callable[[], int],
        *,
        runs_program: bool = False,
    ) -> None:
        """`runs_program`: the process of a rank is the launcher of a program, to which it passes a
        fault on."""
        self._root = root
        self._child_of = child_of
        self._node_killer = lose_node
        self._cut_links = cut_links
        self._show_xid = show_xid
        self._data_port = data_port
        self._runs_program = runs_program
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._armed: dict[int, Injection] = {}

    def accept(self, number: int, fault: Injection) -> None:
        """Execute the fault, now or when it is due. A repeated number changes nothing.

        Raises CannotInject.
        """
        with self._lock:
            if number in self._taken:
                return
            self._taken.add(number)
        if fault.victim is Victim.RANK:
            self._hand_over(number, fault)
        else:
            self._carry_out(fault)

    def pending(self, rank: int) -> tuple[ArmFault, ...]:
        """The orders that a new process of the rank must receive."""
        with self._lock:
            return tuple(
                ArmFault(number, fault.document())
                for number, fault in self._armed.items()
                if fault.rank == rank
            )

    def send_pending(self, rank: int, child: Child) -> None:
        """Send all pending orders to the process that now has the rank; some may have arrived
        after its join order was composed."""
        for order in self.pending(rank):
            child.send(order)

    def fired(self, number: int) -> None:
        with self._lock:
            self._armed.pop(number, None)

    def _hand_over(self, number: int, fault: Injection) -> None:
        assert fault.rank is not None
        child = self._child_of(fault.rank)
        is_rank = child is not None and not self._runs_program
        if child is not None and is_rank and fault.at_once and fault.kind in SIGNALS:
            _signal(child, SIGNALS[fault.kind])
            return
        with self._lock:
            self._armed[number] = fault
        if child is not None:
            child.send(ArmFault(number, fault.document()))

    def _carry_out(self, fault: Injection) -> None:
        match fault.kind:
            case FaultKind.AGENT_DEATH:
                _run_soon(lambda: os.kill(os.getpid(), signal.SIGKILL))
            case FaultKind.NODE_LOSS:
                if self._node_killer is None:
                    raise CannotInject("only a local node can be lost on request; this is not one")
                _run_soon(self._lose_files_and_node)
            case FaultKind.PARTITION:
                self._cut(PARTITION_S if fault.duration_s is None else fault.duration_s)
            case FaultKind.RESET:
                reset_connections(self._data_port())
            case FaultKind.XID:
                self._show_xid(48 if fault.xid is None else fault.xid)
            case FaultKind.REMOTE_DOWN | FaultKind.DISK_FULL:
                lasts_s = STORAGE_S if fault.duration_s is None else fault.duration_s
                self._fail_storage(fault.kind, time.time() + lasts_s)
            case _:
                raise CannotInject(f"{fault.kind} is not a fault of a node")

    def _cut(self, seconds: float) -> None:
        if self._cut_links is None:
            raise CannotInject(
                "no link of this node may be cut: its operator must list the links in "
                f"{link_cut.VARIABLE}, and `ip` (iproute2) must be installed"
            )
        _run_soon(partial(self._cut_links, seconds))

    def _lose_files_and_node(self) -> None:
        assert self._node_killer is not None
        shutil.rmtree(self._root, ignore_errors=True)
        self._node_killer()

    def _fail_storage(self, kind: FaultKind, until: float) -> None:
        temporary = self._root / f".{FAULT_FILE}.{os.getpid()}"
        temporary.write_text(json.dumps({"kind": kind.value, "until": until}))
        temporary.replace(self._root / FAULT_FILE)


def _run_soon(action: Callable[[], None]) -> None:
    """Run `action` after a short delay, so that the order is answered first."""
    threading.Timer(ACTION_DELAY_S, action).start()


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        return  # the process has just died by itself
    child.signal(number)
