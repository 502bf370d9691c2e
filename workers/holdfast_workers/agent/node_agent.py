"""The node agent: runs a node's workers, owns its memory checkpoints, and watches.

It obeys one supervisor at a time: it refuses commands of an older epoch, or of an attempt lower
than the highest that it received. It takes no decision about the run: it reports its observations
as signals and carries out commands. All of its workers die with it. Its memory checkpoints do not:
they are named segments, and the next incarnation on the same node attaches them again.

Threads: `node-io` (children and their messages), `beat-watch`, `health`, those of the data channel,
a few for slow background tasks (forks, fetches), and the threads that call the commands.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig, join_order
from holdfast_workers.agent.background_tasks import BackgroundTasks
from holdfast_workers.agent.event_backup import EventBackup
from holdfast_workers.agent.fork_templates import ForkTemplates
from holdfast_workers.agent.node_health import NodeHealth
from holdfast_workers.agent.node_log import log_signal, node_log
from holdfast_workers.agent.node_memory import NodeMemory
from holdfast_workers.agent.progress_watch import ProgressWatch
from holdfast_workers.agent.remote_cleanup import RemoteCleanup
from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.agent.rendezvous import Rendezvous
from holdfast_workers.agent.run_journal import RunJournal
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.agent.worker_pool import WorkerPool
from holdfast_workers.errors import StaleCommand
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.fault_injection.orders import FaultOrders
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import (
    Child,
    ChildProcesses,
    ZygoteFailed,
    ZygoteProcess,
    start_zygote,
)
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.memory.link_probe import exchange
from holdfast_workers.memory.segment_store import NothingHeld
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import (
    AgentFailure,
    AgentReport,
    Answer,
    Done,
    ExchangeResult,
    Inspections,
    KeptEvents,
    PollAnswer,
    PublishedCheckpoint,
)
from holdfast_workers.protocol.commands import (
    AttemptCommand,
    CheckNode,
    Command,
    Describe,
    ExchangeBytes,
    Fence,
    FinalizeCheckpoint,
    Finish,
    Form,
    FreeMemory,
    Hello,
    InjectFault,
    Inspect,
    ListEvents,
    OpenQuery,
    Poll,
    Query,
    Request,
    SaveShard,
    SetIntervals,
    SetPartners,
    Stop,
    TidyRemoteTier,
    WarmUp,
)
from holdfast_workers.protocol.lease import Grant, Lease, clock_s
from holdfast_workers.protocol.messages import Beat, FormOrder, Seat, StepRow
from holdfast_workers.protocol.signals import Signal, WorkerFailed, ZygoteLost

ZYGOTE_EARLY_S = 30.0
ZYGOTE_LIVES = 3
"""After so many zygotes in a row that ended so early, none is started any more: the node is
unfit."""

RELEASE_WAIT_S = 2.0
"""The time for killed workers to exit before the files that they write are removed."""

STORE_WAIT_S = 2.0
"""How long a fence waits for a rendezvous store that is being forked again."""


class NodeAgent:
    """See the module's promise. `on_signal` is called from several threads and must not block.
    `lose_node()` ends this node and `cut_links(seconds)` takes it off the network, for fault
    injection; None: this node does not support that fault."""

    def __init__(
        self,
        config: AgentConfig,
        on_signal: Callable[[Signal], None],
        lose_node: Callable[[], None] | None = None,
        start_zygote: Callable[[int, dict[str, str]], ZygoteProcess] = start_zygote,
        cut_links: Callable[[float], None] | None = None,
    ) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()
        self._epoch = 0
        self._attempt = 0
        self._mesh = config.mesh
        self._started = False
        self._closing = threading.Event()
        self._failure: AgentFailure | None = None
        self._zygotes_lost_early = 0
        self._events = EventBackup()
        self._log = node_log(config.json_logs)
        self._signals = SignalSender(config.agent, self._incarnation, self._with_log(on_signal))
        self._journal = RunJournal(config.agent, self._incarnation)
        self._background = BackgroundTasks(
            4 + 2 * config.capacity, self._record_failure, self._closing
        )
        self._root = Path(config.memory_root)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lease = Lease(self._send_lease)
        self._memory = NodeMemory(
            config,
            self._root,
            self._signals,
            self._background.run,
            lambda: self._attempt,
            self._closing,
            on_grant=self._renew_lease,
            on_supervisor_end=lambda epoch: self._lease.supervisor_ended(epoch, clock_s()),
        )
        self._child_processes = ChildProcesses(
            config.zygote_config, config.zygote_start_timeout_s, config.fork_timeout_s, start_zygote
        )
        self._rendezvous = Rendezvous(self._child_processes, config.host, self._closing)
        self._saves = RemoteSaves(config, self._root, self._child_processes, self._signals)
        self._saves.remove_leftovers()
        self._cleanup = RemoteCleanup(config, self._child_processes, self._signals)
        self._worker_pool = WorkerPool(
            config,
            self._incarnation,
            self._child_processes,
            ForkTemplates(
                self._child_processes,
                f"{config.agent}.{self._incarnation}",
                config.zygote_start_timeout_s,
                config.fork_timeout_s,
            ),
            self._signals,
            self._journal,
            on_state_held=self._memory.offer,
            on_save=self._saves.take_over,
            on_segment_ready=self._memory.fill_from_other_mesh,
            on_resharded=self._memory.free_other_meshes,
            on_all_joined=lambda: self._background.run(self._worker_pool.fork_spares, self._mesh),
        )
        self._memory.attach(self._worker_pool)
        self._io = NodeIO(self)
        self._worker_pool.attach(self._io)
        self._health = NodeHealth(
            config,
            self._child_processes,
            self._signals,
            lambda: self._attempt,
            lambda: len(self._worker_pool.reports()),
        )
        self._fault_orders = FaultOrders(
            self._root, self._worker_pool.child_of, lose_node, cut_links, self._health.inject_xid
        )
        self._watch = ProgressWatch(config, self._worker_pool.reports, self._signals)
        self._handlers = self._handlers_by_command()

    # --- start and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Start zygote, rendezvous store and warm workers. An exception is also in later
        reports."""
        linux_processes.become_subreaper()
        codec.prepare(WorkerFailed)
        self._io.start()
        self._saves.start(self._io)
        self._cleanup.start(self._io)
        self._health.start()
        self._watch.start()
        try:
            self._child_processes.start()
            self._io.watch_zygote(self._child_processes.pid)
            self._rendezvous.fork(self._io)
            self._worker_pool.fill()
            self._health.check(self._io)
            if not self._rendezvous.wait_running(self._config.fork_timeout_s):
                raise TimeoutError(f"no rendezvous store within {self._config.fork_timeout_s} s")
        except Exception as error:
            self._record_failure(error)
            raise
        self._started = True
        self._log.info("agent_ready", pid=os.getpid(), incarnation=self._incarnation)

    def release(self) -> None:
        """End every process and free all memory that this node holds for the job."""
        self._closing.set()
        self._watch.stop()
        self._worker_pool.stop(RELEASE_WAIT_S)
        self._saves.stop()
        self._cleanup.stop()
        self._health.stop()
        self._io.stop()
        self._child_processes.stop()
        self._memory.close()
        self._background.stop()
        self._memory.free_all()
        shutil.rmtree(self._root, ignore_errors=True)

    # --- commands -------------------------------------------------------------------------------

    def execute(self, request: Request) -> Answer:
        """Carry out a command, or answer a query, and keep the events that came with it.

        Raises StaleCommand if a newer supervisor was accepted, or the command belongs to an attempt
        older than the newest; any other error of a command.
        """
        command = request.command
        if not isinstance(command, OpenQuery):
            attempt = command.attempt if isinstance(command, AttemptCommand) else None
            self._accept(request.epoch, attempt)
        self._events.keep(request.events)
        return self._handlers[type(command)](command)

    def _handlers_by_command(self) -> dict[type[Command | Query], Callable[[Any], Answer]]:
        return {
            Fence: self._fence,
            Form: self._form,
            WarmUp: self._warm_up,
            SetPartners: self._set_partners,
            FreeMemory: self._free_memory,
            SetIntervals: self._set_intervals,
            Finish: self._finish,
            Inspect: self._inspect,
            SaveShard: self._save_held,
            FinalizeCheckpoint: self._finalize,
            TidyRemoteTier: self._tidy,
            CheckNode: self._check,
            InjectFault: self._inject,
            Stop: self._stop,
            Hello: lambda _: self.report(),
            Describe: lambda _: self.report(),
            Poll: self._poll,
            ListEvents: lambda _: KeptEvents(self._events.all()),
            ExchangeBytes: self._exchange,
        }

    def _fence(self, command: Fence) -> AgentReport:
        """End this node's part in every attempt before the command's.

        Returns once no worker of this node can apply another step of an older attempt: each has
        parked or is dead. Takes at most `abort_grace_s` plus the time to reap a killed process.
        Harmless if the attempt has already been formed. Raises WorkerStillAlive or DeliveryStuck.
        """
        attempt = command.attempt
        self._log.info("fenced", attempt=attempt, condemned=command.condemned or None)
        self._memory.refuse(attempt)
        self._worker_pool.fence(attempt, command.condemned)
        self._memory.fence(attempt)
        self._saves.fence(attempt)
        if self._started:
            self._rendezvous.wait_running(STORE_WAIT_S)
        return self.report()

    def _form(self, command: Form) -> Done:
        order = command.order
        ranks = [seat.rank for seat in order.seats]
        self._log.info("forming", attempt=order.attempt, ranks=ranks)
        self._worker_pool.end_unseated(order)
        self._memory.use_mesh(order.mesh)
        self._mesh = order.mesh
        for seat in order.seats:
            self._take_seat(order, seat)
        self._send_lease(order.attempt, *self._lease.until(order.attempt))
        return Done()

    def _warm_up(self, _: WarmUp) -> Done:
        self._worker_pool.fill()
        return Done()

    def _set_partners(self, command: SetPartners) -> Done:
        self._memory.change_partners(command.rank, command.partners, command.attempt)
        return Done()

    def _free_memory(self, command: FreeMemory) -> Done:
        self._memory.free_all_but(command.mesh, command.own, command.replicas)
        return Done()

    def _set_intervals(self, command: SetIntervals) -> Done:
        message = {"op": "intervals", "steps": (command.memory, command.remote)}
        self._worker_pool.send(command.attempt, message)
        return Done()

    def _finish(self, command: Finish) -> Done:
        self._worker_pool.send(command.attempt, {"op": "finish"})
        return Done()

    def _inspect(self, command: Inspect) -> Inspections:
        """Takes at most `inspect_timeout_s`."""
        return Inspections(self._watch.inspect(command.attempt))

    def _save_held(self, command: SaveShard) -> Done:
        """Raises NothingHeld, Overwritten or SegmentSpaceError."""
        rank, place, attempt, step = command.rank, command.place, command.attempt, command.step
        segment = self._memory.find(rank, place)
        commit = segment.find(attempt, step) if segment is not None else None
        if segment is None or commit is None:
            raise NothingHeld(
                f"no step {step} of attempt {attempt} in {place} memory of rank {rank}"
            )
        self._saves.save_held(rank, segment, commit)
        return Done()

    def _finalize(self, command: FinalizeCheckpoint) -> PublishedCheckpoint:
        return self._saves.finalize(command.step, command.attempt, self._io)

    def _tidy(self, command: TidyRemoteTier) -> Done:
        self._cleanup.request(command)
        return Done()

    def _check(self, _: CheckNode) -> AgentReport:
        self._health.check(self._io)
        return self.report()

    def _inject(self, command: InjectFault) -> Done:
        """Raises CannotInject."""
        self._fault_orders.accept(command.number, Injection.of(command.fault))
        return Done()

    def _stop(self, _: Stop) -> Done:
        self._worker_pool.stop()
        return Done()

    def _poll(self, command: Poll) -> PollAnswer:
        self._events.forget(command.acked)
        rows, digests, lines = self._journal.after(command.after_row, command.after_line)
        beats = tuple(replace(beat, groups=()) for beat in self._watch.beats())
        return PollAnswer(
            rows,
            digests,
            lines,
            self._worker_pool.reports(),
            self._saves.shards,
            beats,
            self._saves.failed_shards,
        )

    def _exchange(self, command: ExchangeBytes) -> ExchangeResult:
        problem = exchange(self._config.secret, command.host, command.port, command.timeout_s)
        return ExchangeResult(problem)

    def report(self) -> AgentReport:
        """The present state of this agent, and the checkpoints that it holds."""
        config = self._config
        held = self._memory.held()
        workers = self._worker_pool.reports()
        health = self._health.report()
        store_port = self._rendezvous.port
        # Before `shards`: a shard that is saved in between is in both, never in neither.
        saving = self._saves.saving
        with self._lock:
            return AgentReport(
                agent=config.agent,
                incarnation=self._incarnation,
                node_id=config.node_id,
                host=config.host,
                pid=os.getpid(),
                data_port=self._memory.port,
                store_port=store_port,
                capacity=config.capacity,
                epoch=self._epoch,
                attempt=self._attempt,
                ready=self._started and store_port > 0,
                workers=workers,
                held=held,
                shards=self._saves.shards,
                saving=saving,
                domain=config.domain,
                failure=self._failure,
                health=health,
            )

    def figures(self) -> tuple[tuple[Beat, ...], StepRow | None]:
        """The progress of this node's ranks, and the newest row of metrics that it has."""
        return self._watch.beats(), self._journal.newest()

    # --- callbacks of the I/O thread ------------------------------------------------------------

    def on_worker_message(self, name: str, message: dict[str, Any]) -> None:
        if message["op"] == "injected":
            self._fault_orders.fired(message["number"])
        else:
            self._worker_pool.on_message(name, message)

    def on_child_message(self, child: Child, message: dict[str, Any]) -> None:
        """Handle a message of a store host or saver."""
        if message["op"] == "port":
            self._rendezvous.record_port(message["port"])
        elif child.kind == "saver":
            self._saves.on_message(child, message)

    def on_child_log(self, child: Child, text: str) -> None:
        attempt, rank = self._worker_pool.attempt_and_rank(child.name)
        self._journal.log(worker=child.name, attempt=attempt, rank=rank, text=text)
        self._log.info("output", attempt=attempt, rank=rank, worker=child.name, message=text)

    def on_child_exit(self, child: Child, end: ProcessEnd) -> None:
        """Handle the end of a forked process."""
        if child.kind in ("worker", "template"):
            self._worker_pool.on_exit(child, end)
        elif child.kind == "store":
            self._rendezvous.record_port(0)
            self._background.run(self._rendezvous.fork_again, self._io)
        elif child.kind == "saver":
            self._saves.on_exit(child, end)

    def on_zygote_exit(self) -> None:
        if self._closing.is_set():
            return
        early = self._child_processes.age_s() < ZYGOTE_EARLY_S
        self._zygotes_lost_early = self._zygotes_lost_early + 1 if early else 0
        unfit = ""
        if self._zygotes_lost_early >= ZYGOTE_LIVES:
            unfit = (
                f"its zygote ended {ZYGOTE_LIVES} times in a row within {ZYGOTE_EARLY_S:g} s of "
                "its start: look for what ends it in the node's system log"
            )
            self._record_failure(ZygoteFailed(unfit))
        else:
            self._background.run(self._replace_zygote)
        self._signals.send(ZygoteLost(unfit), self._attempt)

    # --- internals ------------------------------------------------------------------------------

    def _take_seat(self, order: FormOrder, seat: Seat) -> None:
        self._memory.set_partners(seat.rank, seat.partners, order.attempt)
        join = join_order(order, seat, self._config, self._memory.own_segment(seat.rank))
        slot = self._worker_pool.seat(order, seat, join, self._fault_orders.pending(seat.rank))
        if slot is not None:
            self._memory.on_seated(slot, seat, order.attempt)
            self._fault_orders.send_pending(seat.rank, slot.child)  # ordered during its fork

    def _accept(self, epoch: int, attempt: int | None = None) -> None:
        with self._lock:
            if epoch < self._epoch:
                raise StaleCommand(f"epoch {epoch} is older than {self._epoch}")
            if attempt is not None and attempt < self._attempt:
                raise StaleCommand(f"attempt {attempt} is older than {self._attempt}")
            is_new_supervisor = epoch > self._epoch
            self._epoch = epoch
            self._attempt = max(self._attempt, attempt or 0)
        if is_new_supervisor:
            self._lease.supervisor_replaced(epoch, clock_s())

    def _renew_lease(self, grant: Grant) -> None:
        """Renew the lease, unless the grant is of an older supervisor or attempt."""
        with self._lock:
            current = grant.epoch >= self._epoch and grant.attempt >= self._attempt
        if current:
            self._lease.renew(grant)

    def _send_lease(self, attempt: int, until: float, number: int) -> None:
        """Send the lease to the workers. Never waits for a worker that does not read: this may be
        the data server's thread, and the next message supersedes this one."""
        message = {"op": "lease", "until": until, "number": number}
        self._worker_pool.send(attempt, message, wait=False)

    def _with_log(self, on_signal: Callable[[Signal], None]) -> Callable[[Signal], None]:
        def log_and_send(signal: Signal) -> None:
            log_signal(self._log, signal)
            on_signal(signal)

        return log_and_send

    def _replace_zygote(self) -> None:
        self._child_processes.ensure()
        self._io.watch_zygote(self._child_processes.pid)

    def _record_failure(self, error: Exception) -> None:
        """Record in this agent's reports that the node cannot run workers any more, and why."""
        failure = AgentFailure(f"{type(error).__name__}: {error}")
        if isinstance(error, ZygoteFailed):
            failure = error.failure
        self._log.error("agent_failed", **asdict(failure))
        with self._lock:
            self._failure = failure
