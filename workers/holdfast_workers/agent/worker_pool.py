"""The workers of one node: their states, and how they are forked, given ranks, fenced and killed.

The pool follows the workers' own messages and exits, and turns them into signals. A worker is
`warm` (forked, no rank), `joining`, `training`, `parked` (left its attempt), or `done`. A worker's
slot is removed when its process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.devices import Devices
from holdfast_workers.agent.fork_templates import ForkTemplates
from holdfast_workers.agent.oom_kills import MemoryShortage
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.errors import StaleCommand, WorkersError
from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.findings import EarlyStop
from holdfast_workers.protocol.messages import (
    FormOrder,
    JoinOrder,
    Restore,
    Seat,
    Tier,
    WorkerState,
)
from holdfast_workers.protocol.processes import (
    ArmFault,
    AttemptsLeft,
    CommittedToMemory,
    FrozenCopy,
    JoinAttempt,
    LeaseUpdate,
    LeaveAttempts,
    LoadOrder,
    NewIntervals,
    ProgramStarted,
    RankPlace,
    SegmentReady,
    StepDigest,
    StepReport,
    StopAfterStep,
    TemplateJob,
    WorkerJob,
    WorkerMessage,
    WorkerSignal,
)
from holdfast_workers.protocol.signals import (
    FirstStep,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)

EXIT_WAIT_S = 5.0
PROGRAM_GRACE_S = 4.0
"""The time that a launcher has to end its program and all that this has started."""
POLL_S = 0.02


class WorkerStillAlive(WorkersError):
    """A worker neither left its attempt nor died of SIGKILL in time, so the fence cannot be
    proven."""


@dataclass
class Slot:
    """The state of one worker."""

    child: Child
    state: WorkerState = WorkerState.WARM
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    parked_for: int = 0
    """The worker has left every attempt before this one."""
    restore: Restore | None = None
    failure: WorkerFailed | None = None
    """The worker's report of the failure that ended its attempt."""
    early: EarlyStop | None = None
    """Why it ended before the job's last step, if it did."""
    evaluates_first: bool = False
    """It evaluates the first step of its attempt."""
    job: WorkerJob = field(default_factory=lambda: WorkerJob(""))
    program: int = 0
    """Process id of the user's program that the worker has started; 0: the worker is the rank."""

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self.program or self.child.pid

    @property
    def expected(self) -> int | None:
        """The only rank that this worker may be given; None: any rank."""
        return self.job.place.rank if self.job.place is not None else None

    @property
    def expected_mesh(self) -> str:
        return mesh_tag(self.job.place.mesh) if self.job.place is not None else ""

    @property
    def has_joined(self) -> bool:
        """Whether the worker holds the state that its order named, or a later one."""
        return self.state in (WorkerState.TRAINING, WorkerState.DONE, WorkerState.LEFT)


class WorkerPool:
    """Callbacks, called by the I/O thread:

    - `on_state_held(slot, computed)`: a worker's newest state in memory is that of `slot.step`,
      computed by attempt `computed` (None: the attempt that its segment names).
    - `on_save(copy)`: a frozen copy for the remote tier is ready.
    - `on_load(slot, order)`: the worker needs a checkpoint from a bucket.
    - `on_segment_ready(slot, attempt, own)`: the worker has made its segment, to be filled from
      another mesh; `own` holds the entries that belong to its rank alone.
    - `on_resharded()`: every rank and its partners now hold the state on the new mesh.
    - `on_first_step()`: an attempt has made a step.
    """

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        child_processes: ChildProcesses,
        templates: ForkTemplates,
        signals: SignalSender,
        journal: RunJournal,
        on_state_held: Callable[[Slot, int | None], None],
        on_save: Callable[[FrozenCopy], None],
        on_load: Callable[[Slot, LoadOrder], None],
        on_segment_ready: Callable[[Slot, int, dict[str, bytes]], None],
        on_resharded: Callable[[], None],
        on_first_step: Callable[[], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._child_processes = child_processes
        self._templates = templates
        self._signals = signals
        self._journal = journal
        self._on_state_held = on_state_held
        self._hand_to_saver = on_save
        self._hand_to_loader = on_load
        self._on_segment_ready = on_segment_ready
        self._on_resharded = on_resharded
        self._on_first_step = on_first_step
        self._shortage = MemoryShortage()
        self._devices = Devices(config.gpus_per_worker)
        self._io: NodeIO | None = None
        self._changed = threading.Condition()
        self._slots: dict[str, Slot] = {}
        self._dismissed: list[Child] = []  # to be killed; see `end_unseated`
        self._forking = threading.Lock()
        self._forked = 0
        self._fenced = 0
        self._closing = False

    def attach(self, io: NodeIO) -> None:
        """Set the I/O thread that watches the workers from now on."""
        self._io = io
        self._templates.attach(io)

    # --- orders ---------------------------------------------------------------------------------

    def fork(self) -> str:
        """Fork a worker, and return its name. Raises ZygoteFailed or NoDeviceFree."""
        with self._forking:
            return self._fork()

    def _fork_for(self, order: FormOrder, rank: int) -> str:
        place = RankPlace.of(order.mesh, rank)
        with self._forking:
            return self._fork(place if self._templates.has(place) else None)

    def fill(self) -> None:
        """Fork workers until the node has as many as it can run. Thread-safe."""
        while True:
            with self._forking:
                if self._closing or len(self._slots) >= self._config.capacity:
                    return
                self._fork()

    def fork_spares(self, mesh: dict[str, int]) -> None:
        """Fork a spare worker for each rank of `mesh` on this node, up to `ranks_with_spares`. Each
        is forked from its rank's template, with all that can be built ahead. Thread-safe."""
        ranks = self._ranks_with_spares()
        self._templates.ensure([RankPlace.of(mesh, rank) for rank in ranks])
        while True:
            with self._forking:
                places = [RankPlace.of(mesh, rank) for rank in self._ranks_with_spares()]
                missing = [place for place in places if not self._has_spare(place)]
                if self._closing or not missing:
                    return
                self._fork(missing[0])

    def prepare(
        self, mesh: dict[str, int], ranks: Collection[int], present: dict[str, int]
    ) -> None:
        """Fork a spare worker for each of `ranks` of a mesh that the job changes to next, as far as
        templates can be made for them. Those of meshes other than this and the `present` one are
        killed. Thread-safe."""
        places = [RankPlace.of(mesh, rank) for rank in ranks]
        self._end_spares_beside((mesh, present))
        self._templates.ensure(places)
        for place in places:
            with self._forking:
                if self._closing or self._has_spare(place) or not self._templates.has(place):
                    continue
                self._fork(place)

    def _end_spares_beside(self, meshes: Collection[dict[str, int]]) -> None:
        with self._changed:
            outdated = [
                slot.child
                for slot in self._slots.values()
                if slot.state is WorkerState.WARM
                if slot.job.place is not None and slot.job.place.mesh not in meshes
            ]
        for child in outdated:
            child.kill()

    def _has_spare(self, place: RankPlace) -> bool:
        with self._changed:
            slots = tuple(self._slots.values())
        return any(slot.job.place == place and slot.state is WorkerState.WARM for slot in slots)

    def _ranks_with_spares(self) -> list[int]:
        with self._changed:
            ranks = {slot.rank for slot in self._slots.values() if slot.rank is not None}
        return sorted(ranks)[: self._config.ranks_with_spares]

    def fence(self, attempt: int, condemned: Collection[str] = ()) -> None:
        """Return once every worker with a rank has left all attempts before `attempt`: it has
        parked or is dead.

        The workers in `condemned` hang, and are killed without being asked to leave. Workers that
        already have a seat in `attempt` are left alone, however late this call comes. From here on
        no worker gets a seat in an older attempt. Raises WorkerStillAlive.
        """
        with self._changed:
            self._fenced = max(self._fenced, attempt)
            slots = {name: slot for name, slot in self._slots.items() if slot.attempt < attempt}
        self._kill_dismissed()
        for slot in slots.values():
            if self._config.brings_program:  # its launcher does not hang, and ends it whole
                slot.child.send(LeaveAttempts(attempt))
            elif slot.name in condemned:
                slot.child.kill("it held up the other ranks")
            elif self._config.reform == Reform.FORK and slot.state is not WorkerState.WARM:
                slot.child.kill()
            else:
                slot.child.send(LeaveAttempts(attempt))
        slots = {name: slot for name, slot in slots.items() if slot.attempt}
        if self._wait_parked(slots, attempt, POLL_S):
            return
        self._kill_stragglers(slots, attempt)
        if not self._wait_parked(slots, attempt, EXIT_WAIT_S):
            names = ", ".join(self._unparked(slots, attempt))
            raise WorkerStillAlive(f"{names} did not die within {EXIT_WAIT_S} s of being killed")

    def seat(
        self, order: FormOrder, seat: Seat, join: JoinOrder, faults: tuple[ArmFault, ...]
    ) -> Slot | None:
        """Give a rank to its worker, with the faults that are injected into it. None if the worker
        is gone; a signal reports that.

        Raises StaleCommand if a newer attempt was announced before or during this call.
        """
        name = seat.worker if seat.worker is not None else self._fork_for(order, seat.rank)
        with self._changed:
            self._refuse_stale(order)
            slot = self._slots.get(name)
            if slot is not None:
                slot.state, slot.attempt, slot.rank = WorkerState.JOINING, order.attempt, seat.rank
                slot.restore, slot.failure, slot.program = seat.restore, None, 0
                slot.early = None
        if slot is None:  # it died between the fence's answer and this order
            gone = WorkerExited(why="the worker was gone before it could take its rank")
            self._signals.send(gone, order.attempt, seat.rank, name)
            return None
        slot.child.send(JoinAttempt(join, faults))
        return slot

    def end_unseated(self, order: FormOrder) -> None:
        """Dismiss the workers that the order does not name, except spare workers for its ranks, and
        the templates for other ranks.

        They are killed once the attempt makes steps, or is fenced: the kernel takes tens of
        milliseconds of processor time to take back the memory of each, and the attempt that forms
        needs it more.
        Workers with devices are killed at once, as their successors need the devices; and so are
        those that read token sets, as they keep shards in the node's cache.
        """
        seated = {seat.worker for seat in order.seats}
        with self._changed:
            self._refuse_stale(order)
            unseated = [name for name in self._slots if name not in seated]
            spare = [name for name in unseated if self._is_spare(self._slots[name], order)]
            children = [self._slots.pop(name).child for name in unseated if name not in spare]
        children += self._templates.keep(
            {RankPlace.of(order.mesh, seat.rank) for seat in order.seats}
        )
        with self._changed:
            self._dismissed += children
        needs_room = self._config.gpus_per_worker or self._config.reads_token_sets
        if needs_room or self._closing:
            self._kill_dismissed()

    def _kill_dismissed(self) -> None:
        with self._changed:
            children, self._dismissed = self._dismissed, []
        for child in children:
            child.kill()

    def send(
        self, message: LeaseUpdate | NewIntervals | StopAfterStep, *, or_drop: bool = False
    ) -> None:
        """Send `message` to every worker with a rank in its attempt; see `Child.send`."""
        with self._changed:
            slots = [slot for slot in self._slots.values() if slot.attempt == message.attempt]
        for slot in slots:
            slot.child.send(message, or_drop=or_drop)

    def stop(self, wait_s: float = 0.0) -> None:
        """Kill every worker, and wait up to `wait_s` for their exits, which are not signalled."""
        with self._changed:
            self._closing = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.child.kill()
        self._kill_dismissed()
        self._templates.stop(wait_s)
        with self._changed:
            self._changed.wait_for(lambda: not self._slots, wait_s)

    # --- queries --------------------------------------------------------------------------------

    def reports(self) -> tuple[WorkerReport, ...]:
        with self._changed:
            return tuple(
                WorkerReport(
                    n,
                    s.pid,
                    s.state,
                    s.attempt,
                    s.rank,
                    s.step,
                    s.failure,
                    s.expected,
                    s.expected_mesh,
                    s.early,
                    s.evaluates_first,
                )
                for n, s in self._slots.items()
            )

    def with_rank(self, rank: int) -> Slot | None:
        """The worker that holds `rank`, in the newest attempt in which this node has it."""
        with self._changed:
            holders = [slot for slot in self._slots.values() if slot.rank == rank]
        return max(holders, key=lambda slot: slot.attempt, default=None)

    def child_of(self, rank: int) -> Child | None:
        slot = self.with_rank(rank)
        return slot.child if slot is not None else None

    def attempt_and_rank(self, name: str) -> tuple[int, int | None]:
        """(attempt, rank) of a worker; (0, None) if it is unknown."""
        with self._changed:
            slot = self._slots.get(name)
        return (slot.attempt, slot.rank) if slot else (0, None)

    # --- messages of workers --------------------------------------------------------------------

    def on_message(self, name: str, message: WorkerMessage) -> None:
        """Handle a worker's message; called by the I/O thread."""
        with self._changed:
            slot = self._slots.get(name)
        if slot is None:
            return
        match message:
            case StepReport():
                self._record_row(slot, message)
            case StepDigest(step=step, digest=digest, attempt=attempt):
                self._journal.add_digest(step, digest, attempt)
            case CommittedToMemory(attempt=attempt, step=step, protected=protected):
                with self._changed:
                    slot.step = step
                self._on_state_held(slot, attempt)
                self._end_reshard(slot, protected)
            case FrozenCopy():
                self._hand_to_saver(message)
            case LoadOrder():
                self._hand_to_loader(slot, message)
            case SegmentReady(attempt=attempt, own=own):
                self._on_segment_ready(slot, attempt, own)
            case AttemptsLeft(attempt=attempt):
                self._record_parked(slot, attempt)
            case ProgramStarted(attempt=attempt, pid=pid):
                with self._changed:
                    if attempt == slot.attempt:
                        slot.program = pid
            case WorkerSignal():
                self._pass_on(slot, message)

    def on_exit(self, child: Child, end: ProcessEnd) -> None:
        """Handle the end of a worker's or a template's process. The exit is signalled before a
        waiting fence returns."""
        if isinstance(child.job, TemplateJob):
            self._templates.on_exit(child)
            return
        with self._changed:
            slot = self._slots.get(child.name)
        self._beacon_of(child.name).unlink(missing_ok=True)
        if slot is not None and not self._closing:
            self._send_exit_signal(slot, end)
        with self._changed:
            self._slots.pop(child.name, None)
            self._devices.free(child.name)
            self._changed.notify_all()

    def _record_row(self, slot: Slot, report: StepReport) -> None:
        row = report.row
        with self._changed:
            slot.step, slot.evaluates_first = row.step, False
        self._end_reshard(slot, row.protected_step)
        if self._journal.add_row(row):
            first = FirstStep(row.step, row.at)
            self._signals.send(first, row.attempt, report.rank, slot.name, pid=slot.pid)
            self._kill_dismissed()
            self._on_first_step()

    def _end_reshard(self, slot: Slot, protected: int) -> None:
        """`protected`: every rank and its partners hold this step on the new mesh."""
        with self._changed:
            restore = slot.restore
            ended = (
                restore is not None and restore.tier is Tier.RESHARD and protected >= restore.step
            )
            if ended:
                slot.restore = None
        if ended:
            self._on_resharded()

    def _record_parked(self, slot: Slot, attempt: int) -> None:
        with self._changed:
            slot.parked_for = max(slot.parked_for, attempt)
            if slot.attempt < attempt and slot.state is not WorkerState.WARM:
                slot.state = WorkerState.PARKED
            self._changed.notify_all()

    def _pass_on(self, slot: Slot, signal: WorkerSignal) -> None:
        """Take note of a worker's event, then report it."""
        match signal.detail:
            case WorkerJoined(step=step):
                with self._changed:
                    slot.state, slot.step = WorkerState.TRAINING, step
                    slot.evaluates_first = False
                self._on_state_held(slot, None)
            case FirstStep():
                with self._changed:
                    slot.evaluates_first = True
            case WorkerFailed() as failure:
                with self._changed:
                    slot.failure = failure
            case WorkerDone(step=step, early=early):
                with self._changed:
                    slot.state, slot.step, slot.early = WorkerState.DONE, step, early
            case WorkerLeft(step=step):
                with self._changed:
                    slot.state, slot.step = WorkerState.LEFT, step
        self._signals.send(signal.detail, signal.attempt, signal.rank, slot.name, pid=slot.pid)

    # --- internals ------------------------------------------------------------------------------

    def _send_exit_signal(self, slot: Slot, end: ProcessEnd) -> None:
        unexplained = end.name == "SIGKILL" and not slot.child.killed_because
        exited = WorkerExited(
            exit_code=end.exit_code,
            signal=end.signal,
            name=end.name,
            step=slot.step,
            state=slot.state,
            why=slot.child.killed_because,
            out_of_memory=self._shortage.explains_kill() if unexplained else "",
        )
        self._signals.send(exited, slot.attempt, slot.rank, slot.name, pid=slot.pid)

    def _fork(self, place: RankPlace | None = None) -> str:
        """`place`: the only place that the worker may be given; None: any place."""
        with self._changed:
            self._forked += 1
            name = f"{self._config.agent}.{self._incarnation}.{self._forked}"
            self._changed.wait_for(self._can_have_devices, EXIT_WAIT_S)
            env = self._devices.assign(name)
        path = self._beacon_of(name)
        job = WorkerJob(str(path), env, place, launches=self._config.brings_program)
        try:
            beacon.create(path)
            fork = self._child_processes.fork if place is None else self._templates.fork
            child = fork(name, job)
        except BaseException:  # no worker's exit will remove the beacon
            path.unlink(missing_ok=True)
            with self._changed:
                self._devices.free(name)
            raise
        with self._changed:
            self._slots[name] = Slot(child, job=job)
        assert self._io is not None
        self._io.watch(child)
        if self._closing:  # `stop` did not see this worker
            child.kill()
        return name

    def _beacon_of(self, name: str) -> Path:
        return beacon.path_of(Path(self._config.memory_root), name)

    def _is_spare(self, slot: Slot, order: FormOrder) -> bool:
        """Whether a worker is a spare for a rank of the order, on the mesh that it was built
        for."""
        waits = slot.state is WorkerState.WARM and slot.job.place is not None
        return waits and slot.job.place in {RankPlace.of(order.mesh, s.rank) for s in order.seats}

    def _refuse_stale(self, order: FormOrder) -> None:
        if order.attempt < self._fenced:
            raise StaleCommand(f"attempt {order.attempt} is older than {self._fenced}")

    def _kill_stragglers(self, slots: dict[str, Slot], attempt: int) -> None:
        """Kill the workers that do not leave: after `asleep_limit_s` if they sleep, after
        `abort_grace_s` otherwise.

        A worker that computes gets its grace. A worker that still sleeps although every connection
        of its groups is cut waits for an event that will never come: when a connection ends, gloo
        drops a send whose receiver never arrived, and waits for its time-out.
        """
        grace_s = self._config.abort_grace_s
        if self._config.brings_program:  # its launcher kills it sooner, and waits for its end
            grace_s = max(grace_s, PROGRAM_GRACE_S)
        deadline = time.monotonic() + grace_s
        asleep = dict.fromkeys(slots, 0)
        while time.monotonic() < deadline:
            for name in self._unparked(slots, attempt):
                waits = slots[name].program == 0 and _sleeps(slots[name])
                asleep[name] = asleep[name] + 1 if waits else 0
                if asleep[name] * POLL_S >= self._config.asleep_limit_s:
                    slots[name].child.kill("it still slept after its connections were cut")
            if self._wait_parked(slots, attempt, POLL_S):
                return
        for name in self._unparked(slots, attempt):
            slots[name].child.kill(f"it did not leave within {grace_s} s")

    def _unparked(self, slots: dict[str, Slot], attempt: int) -> list[str]:
        return [n for n, s in slots.items() if n in self._slots and s.parked_for < attempt]

    def _wait_parked(self, slots: dict[str, Slot], attempt: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unparked(slots, attempt), timeout_s)

    def _can_have_devices(self) -> bool:
        """Whether a wait for devices is over: no worker that was killed still holds some."""
        return self._devices.enough_free or self._devices.holders <= self._slots.keys()


def _sleeps(slot: Slot) -> bool:
    """Whether all threads sleep, except the control thread: that keeps cutting connections."""
    return linux_processes.is_asleep(slot.child.pid, ignored_thread=control_channel.THREAD_NAME)
