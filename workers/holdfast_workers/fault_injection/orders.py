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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.fault_injection.kinds import FaultKind, Injection, Victim
from holdfast_workers.fault_injection.network_faults import VARIABLE, link_cutter, reset_connections
from holdfast_workers.ipc.children import Child
from holdfast_workers.protocol.processes import ArmFault

ACTION_DELAY_S = 0.02


class CannotInject(WorkersError):
    """This node cannot execute the requested fault."""


@dataclass(frozen=True)
class NodeMeans:
    """What a node's own faults act on. A fault that needs more of the agent adds it here."""

    root: Path
    """The folder of the agent's files."""
    data_port: Callable[[], int] = lambda: 0
    show_xid: Callable[[int], None] = lambda _code: None
    """Makes its health probe report an XID."""
    lose: Callable[[], None] | None = None
    """Ends everything that runs on the node; None: the node cannot be lost on request."""
    cut_links: Callable[[float], None] | None = field(default_factory=link_cutter)
    """Disconnects the node for some seconds; None: no link of it may be cut."""


class FaultOrders:
    """Dispatches the faults of one node. Thread-safe.

    `child_of(rank)` is the process of the rank, if any.
    """

    def __init__(
        self,
        child_of: Callable[[int], Child | None],
        node: NodeMeans,
        *,
        runs_program: bool = False,
    ) -> None:
        """`runs_program`: the process of a rank is the launcher of a program, to which it passes a
        fault on."""
        self._child_of = child_of
        self._node = node
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
        child, signal_ = self._child_of(fault.rank), fault.kind.spec.signal
        if child is not None and not self._runs_program and fault.at_once and signal_ is not None:
            _signal(child, signal_)
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
                _lose(self._node)
            case FaultKind.PARTITION:
                _cut_links(self._node, fault.value("duration_s"))
            case FaultKind.RESET:
                reset_connections(self._node.data_port())
            case FaultKind.XID:
                self._node.show_xid(fault.value("xid"))
            case FaultKind.REMOTE_DOWN | FaultKind.DISK_FULL:
                _fail_storage(self._node, fault.kind, time.time() + fault.value("duration_s"))
            case _:
                raise CannotInject(f"{fault.kind} is not a fault of a node")


def _lose(node: NodeMeans) -> None:
    lose = node.lose
    if lose is None:
        raise CannotInject("only a local node can be lost on request; this is not one")

    def lose_files_and_node() -> None:
        shutil.rmtree(node.root, ignore_errors=True)
        lose()

    _run_soon(lose_files_and_node)


def _cut_links(node: NodeMeans, seconds: float) -> None:
    if node.cut_links is None:
        raise CannotInject(
            "no link of this node may be cut: its operator must list the links in "
            f"{VARIABLE}, and `ip` (iproute2) must be installed"
        )
    _run_soon(partial(node.cut_links, seconds))


def _fail_storage(node: NodeMeans, kind: FaultKind, until: float) -> None:
    temporary = node.root / f".{FAULT_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps({"kind": kind.value, "until": until}))
    temporary.replace(node.root / FAULT_FILE)


def _run_soon(action: Callable[[], None]) -> None:
    """Run `action` after a short delay, so that the order is answered first."""
    threading.Timer(ACTION_DELAY_S, action).start()


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        return  # the process has just died by itself
    child.signal(number)
