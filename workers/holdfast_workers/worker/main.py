"""A worker: one training process, forked by the zygote, owned by its node agent.

The main thread trains; a second thread always answers control messages. A fence cuts the sockets
of the attempt's process groups, so the main thread leaves any blocking collective at once, discards
the unfinished step, and waits for the next attempt in the same process. A worker ends when its
agent closes the control socket or dies.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, TypeVar

import structlog

from holdfast_workers.data.token_corpus import PATIENCE_S
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.ipc import control_channel, linux_processes, readiness
from holdfast_workers.parallelize import process_groups
from holdfast_workers.progress import collective_counts
from holdfast_workers.progress.beacon import Beacon
from holdfast_workers.protocol.lease import clock_s
from holdfast_workers.protocol.messages import DATA_PHASE, JoinOrder
from holdfast_workers.protocol.processes import (
    WORKER_ORDERS,
    ArmFault,
    AttemptsLeft,
    FaultFired,
    JoinAttempt,
    LeaseUpdate,
    LeaveAttempts,
    LoadOutcome,
    LoadResult,
    NewIntervals,
    PartnerPresence,
    RankPlace,
    StateReply,
    StepReplicated,
    StopAfterStep,
    WorkerMessage,
    WorkerOrder,
    ZygoteConfig,
)
from holdfast_workers.training import rank_log
from holdfast_workers.training.recipe import World
from holdfast_workers.worker.attempt import AttemptFenced, RankAttempt

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

SEVER_RETRY_S = 0.01
LOG_WAIT_OVER_S = 0.5
_PREPARE_BOUND_S = 2 * PATIENCE_S
"""Of the preparation of a recipe in an attempt: longer than it waits for a file."""
_log = structlog.get_logger()
Value = TypeVar("Value")


def expected_world(place: RankPlace | None, device: str) -> World | None:
    """The world of a rank of a mesh, without an attempt; None for None."""
    if place is None:
        return None
    return World(place.rank, prod(place.mesh.values()), place.mesh, 0, device)


class Worker:
    """Runs one attempt after the other until the agent stops the process."""

    def __init__(
        self,
        end: socket.socket,
        config: ZygoteConfig,
        recipe: Recipe,
        beacon: Beacon,
        expected: World | None,
        is_prepared: bool,
    ) -> None:
        """`expected`: the only mesh and rank that the worker may get; it prepares for them.
        `is_prepared`: whether the recipe is; else the first attempt prepares it."""
        self._faults = FaultPoints.from_environment()
        self._faults.recipe = recipe
        self._link = WorkerLink(end, self._faults)
        self._beacon = beacon
        self._config = config
        self._recipe = recipe
        self._built_for: World | None = None
        self._expected = expected
        self._is_prepared = is_prepared

    def run(self) -> int:
        self._link.start()
        self._beacon.make_current()
        collective_counts.install(self._beacon)
        if self._expected is not None and self._is_prepared:
            self._recipe.expect(self._expected)
        self._beacon.end()
        while True:
            match self._link.next_order():
                case LeaveAttempts(attempt=attempt):
                    self._link.send(AttemptsLeft(attempt))
                case JoinAttempt(order=order):
                    self._run_attempt(order)

    def _run_attempt(self, order: JoinOrder) -> None:
        if not self._link.enter(order.attempt, has_partner=bool(order.seat.partners)):
            return  # it is fenced already; the fence message follows
        attempt = RankAttempt(
            order,
            self._config,
            self._recipe,
            self._link,
            self._faults,
            self._beacon,
            self._built_for,
        )
        self._beacon.begin(order.attempt)
        try:
            if not self._is_prepared:
                # If the data is away still, that is no hang: the attempt ends and says so.
                self._beacon.enter(DATA_PHASE, 0, bound_s=_PREPARE_BOUND_S)
                self._recipe.prepare()
                self._is_prepared = True
            attempt.run()
        except Exception as error:
            if isinstance(error, AttemptFenced) or self._link.is_fenced(order.attempt):
                attempt.fenced()
            else:
                attempt.failed(error)
            self._link.sever()
            attempt.abandon()
        finally:
            self._beacon.end()
            self._built_for = attempt.built_for
            self._link.leave()


class WorkerLink:
    """The worker's side of its control socket, with a thread that always answers.

    One condition protects the values shared with the training thread: the fence, the replicated
    steps, the agent's reply about the state, save intervals and leases.
    """

    def __init__(self, end: socket.socket, faults: FaultPoints) -> None:
        self._end = end
        self._faults = faults
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[JoinAttempt | LeaveAttempts] = queue.SimpleQueue()
        self._fence = 0
        self._attempt = 0  # 0: in no attempt
        self._aborted = 0  # the newest attempt whose communicators of devices were aborted
        self._foreign_sockets: frozenset[process_groups.OpenSocket] = frozenset()
        self._replicated: dict[int, int] = {}  # attempt -> newest step that all partners hold
        self._state: dict[int, StateReply] = {}  # attempt -> the agent's reply about the state
        self._load: dict[int, LoadOutcome] = {}  # attempt -> the outcome of the ordered load
        self._partnered = (0, True)  # (attempt, whether it has a partner)
        self._intervals: dict[int, tuple[int, int]] = {}  # attempt -> save intervals
        self._injected: set[int] = set()
        self._leases: dict[int, tuple[int, float]] = {}  # attempt -> (number, until when)
        self._to_finish = 0  # the newest attempt that shall stop after its next agreed step
        self._to_leave = 0  # the newest attempt that the ranks shall leave then

    def start(self) -> None:
        threading.Thread(target=self._listen, name=control_channel.THREAD_NAME, daemon=True).start()

    def send(self, message: WorkerMessage) -> None:
        with self._sending:
            control_channel.send(self._end, message)

    def next_order(self) -> JoinAttempt | LeaveAttempts:
        return self._orders.get()

    def enter(self, attempt: int, *, has_partner: bool) -> bool:
        """Let a fence cut every connection that is made in this attempt from now on. False if the
        attempt is already fenced: the idle control thread would not cut by itself."""
        with self._changed:
            if self.is_fenced(attempt):
                return False
            self._foreign_sockets = process_groups.open_sockets()
            if self._partnered[0] < attempt:  # otherwise the agent has already sent a newer value
                self._partnered = (attempt, has_partner)
            self._attempt = attempt
            return True

    def leave(self) -> None:
        with self._changed:
            self._attempt = 0

    def is_fenced(self, attempt: int) -> bool:
        return attempt < self._fence

    def is_to_finish(self, attempt: int) -> bool:
        return attempt == self._to_finish

    def is_to_leave(self, attempt: int) -> bool:
        return attempt == self._to_leave

    def has_lease(self, attempt: int) -> bool:
        """Whether the supervisor's lease is valid now."""
        return self._leases.get(attempt, (0, 0.0))[1] > clock_s()

    def await_lease(self, attempt: int) -> None:
        """Return as soon as the attempt has a lease, or is fenced.

        There is no deadline: without a lease, this rank may already have been replaced on another
        node, so it must not step.
        """
        began = time.monotonic()
        with self._changed:
            while not self.is_fenced(attempt) and not self.has_lease(attempt):
                self._changed.wait()
        waited_s = time.monotonic() - began
        if waited_s > LOG_WAIT_OVER_S:
            rank_log.log_lease_wait(attempt, waited_s)

    def intervals(self, attempt: int) -> tuple[int, int] | None:
        """The save intervals received since the attempt was joined."""
        return self._intervals.get(attempt)

    def sever(self) -> None:
        """Shut down every connection made since `enter`, and abort the communicators of devices,
        once in each attempt."""
        if self._aborted < self._attempt:
            self._aborted = self._attempt
            process_groups.abort_device_groups()
        process_groups.disconnect(process_groups.open_sockets() - self._foreign_sockets)

    def wait_replicated(self, attempt: int, step: int, timeout_s: float) -> int:
        """The newest step that all partners hold; waits up to `timeout_s` for it to reach `step`.
        Without a partner, returns `step`."""

        def reached() -> bool:
            return (
                not self._partnered[1] or self._newest(attempt) >= step or self.is_fenced(attempt)
            )

        with self._changed:
            self._changed.wait_for(reached, timeout_s)
            return self._newest(attempt) if self._partnered[1] else step

    def wait_state(self, attempt: int, timeout_s: float) -> StateReply:
        """The agent's reply that this rank's segment contains the state, or why it does not."""
        late = f"the state did not arrive within {timeout_s} s"
        return self._wait_for(self._state, attempt, timeout_s) or StateReply(attempt, late)

    def wait_load(self, attempt: int, number: int, timeout_s: float) -> LoadOutcome:
        """The outcome of the load that this rank has ordered with this number."""
        late = f"the checkpoint was not loaded within {timeout_s} s"
        outcome = self._wait_for(
            self._load, attempt, timeout_s, lambda found: found.number == number
        )
        return outcome or LoadOutcome(attempt, LoadResult.FAILED, reason=late)

    def _wait_for(
        self,
        by_attempt: dict[int, Value],
        attempt: int,
        timeout_s: float,
        is_answer: Callable[[Value], bool] = lambda _: True,
    ) -> Value | None:
        def has_answer() -> bool:
            return attempt in by_attempt and is_answer(by_attempt[attempt])

        with self._changed:
            self._changed.wait_for(lambda: has_answer() or self.is_fenced(attempt), timeout_s)
            if self.is_fenced(attempt):
                raise AttemptFenced(attempt)
            return by_attempt.pop(attempt) if has_answer() else None

    def _newest(self, attempt: int) -> int:
        return self._replicated.get(attempt, -1)

    def _listen(self) -> None:
        """The control thread: training never blocks it; it ends the process with its agent."""
        linux_processes.name_thread(control_channel.THREAD_NAME)
        try:
            while True:
                cutting = self._must_cut()
                if not readiness.is_readable(self._end, SEVER_RETRY_S if cutting else None):
                    self.sever()  # connections may have been made since the last time
                    continue
                self._handle(control_channel.receive(self._end, *WORKER_ORDERS))
        except control_channel.ControlClosed:
            os._exit(0)
        except BaseException:  # a worker without control messages must not continue training
            _log.exception("the control thread failed; the worker ends")
            os._exit(1)

    def _must_cut(self) -> bool:
        return 0 < self._attempt < self._fence

    def _handle(self, message: WorkerOrder) -> None:
        match message:
            case ArmFault():
                self._inject(message)
            case JoinAttempt(faults=faults):
                for fault in faults:
                    self._inject(fault)
        with self._changed:
            self._take_in(message)
            self._changed.notify_all()
        if isinstance(message, JoinAttempt | LeaveAttempts):
            self._orders.put(message)
        if self._must_cut():
            self.sever()

    def _take_in(self, message: WorkerOrder) -> None:
        match message:
            case LeaveAttempts(attempt=attempt):
                self._fence = max(self._fence, attempt)
            case StepReplicated(attempt=attempt, step=step):
                _keep_newest(self._replicated, attempt, step)
                if attempt == self._partnered[0]:
                    self._partnered = (attempt, True)  # a failed partner has recovered
            case StateReply(attempt=attempt):
                _keep_newest(self._state, attempt, message)
            case LoadOutcome(attempt=attempt):
                # The outcome of an order that is waited for no more may arrive late.
                if message.number >= self._load.get(attempt, message).number:
                    _keep_newest(self._load, attempt, message)
            case PartnerPresence(attempt=attempt, present=present):
                if attempt >= self._partnered[0]:
                    self._partnered = (attempt, present)
                    self._replicated.clear()  # it was about the previous partners
            case NewIntervals(attempt=attempt, steps=steps):
                _keep_newest(self._intervals, attempt, steps)
            case LeaseUpdate(attempt=attempt, until=until, number=number):
                # An older lease may arrive after a newer one.
                lease = (number, until)
                _keep_newest(self._leases, attempt, max(lease, self._leases.get(attempt, lease)))
            case StopAfterStep(attempt=attempt, leaves=True):
                self._to_leave = max(self._to_leave, attempt)
            case StopAfterStep(attempt=attempt):
                self._to_finish = max(self._to_finish, attempt)

    def _inject(self, order: ArmFault) -> None:
        """Arm the fault once for each number, even if the order is repeated."""
        if order.number in self._injected:
            return
        self._injected.add(order.number)
        report = FaultFired(order.number)
        self._faults.arm(Injection.of(order.fault), lambda: self.send(report))


def _keep_newest(by_attempt: dict[int, Value], attempt: int, value: Value) -> None:
    """Keep only the newest attempt's value: a message about an older attempt may arrive late."""
    if attempt >= max(by_attempt, default=0):
        by_attempt.clear()
        by_attempt[attempt] = value
