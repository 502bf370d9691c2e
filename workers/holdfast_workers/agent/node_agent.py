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
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig, join_fields
from holdfast_workers.agent.background_tasks import BackgroundTasks
from holdfast_workers.agent.event_backup import EventBackup, Events
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
from holdfast_workers.memory.link_probe import exchange
from holdfast_workers.memory.segment_store import NothingHeld
from holdfast_workers.protocol.lease import Grant, Lease, clock_s
from holdfast_workers.protocol.messages import (
    AgentReport,
    Beat,
    FormOrder,
    Inspection,
    Partner,
    Place,
    PollAnswer,
    Seat,
    Signal,
    SignalKind,
    StepRow,
)

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
        self._failure: dict[str, Any] | None = None
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

    # --- start and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Start zygote, rendezvous store and warm workers. An exception is also in later
        reports."""
        linux_processes.become_subreaper()
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

    def hello(self, epoch: int) -> AgentReport:
        """Accept the supervisor of `epoch`. Raises StaleCommand if a newer supervisor was
        accepted."""
        self._accept(epoch)
        return self.report()

    def fence(
        self, epoch: int, attempt: int, events: Events = (), condemned: tuple[str, ...] = ()
    ) -> AgentReport:
        """End this node's part in every attempt before `attempt`.

        Returns once no worker of this node can apply another step of an older attempt: each has
        parked or is dead. The workers in `condemned` hang, and are killed at once. Takes at most
        `abort_grace_s` plus the time to reap a killed process. Harmless if `attempt` has already
        been formed. Raises WorkerStillAlive or DeliveryStuck.
        """
        self._accept(epoch, attempt)
        self._events.keep(events)
        self._log.info("fenced", attempt=attempt, condemned=condemned or None)
        self._memory.refuse(attempt)
        self._worker_pool.fence(attempt, condemned)
        self._memory.fence(attempt)
        self._saves.fence(attempt)
        if self._started:
            self._rendezvous.wait_running(STORE_WAIT_S)
        return self.report()

    def form(self, epoch: int, order: FormOrder, events: Events = ()) -> None:
        """Give the ranks of `order` to this node's workers; signals report how each joins."""
        self._accept(epoch, order.attempt)
        self._events.keep(events)
        ranks = [seat.rank for seat in order.seats]
        self._log.info("forming", attempt=order.attempt, ranks=ranks)
        self._worker_pool.end_unseated(order)
        self._memory.use_mesh(order.mesh)
        self._mesh = order.mesh
        for seat in order.seats:
            self._take_seat(order, seat)
        self._send_lease(order.attempt, *self._lease.until(order.attempt))

    def set_partners(
        self, epoch: int, attempt: int, rank: int, partners: tuple[Partner, ...]
    ) -> None:
        """Replicate `rank` to these partners from now on, without a new attempt."""
        self._accept(epoch, attempt)
        self._memory.change_partners(rank, partners, attempt)

    def free_memory(
        self,
        epoch: int,
        attempt: int,
        mesh: dict[str, int],
        own: frozenset[int],
        replicas: frozenset[int],
    ) -> None:
        """Free all memory checkpoints, those of other meshes too, except those of the named ranks
        of `mesh`. For a standby: no order tells it that the others will not be used again."""
        self._accept(epoch, attempt)
        self._memory.free_all_but(mesh, own, replicas)

    def warm_up(self, epoch: int, attempt: int) -> None:
        """Fork workers up to the node's capacity, so that no rank has to wait for a fork."""
        self._accept(epoch, attempt)
        self._worker_pool.fill()

    def finish(self, epoch: int, attempt: int, events: Events = ()) -> None:
        """Make the ranks of this node propose that all ranks stop after the next agreed step and
        save it."""
        self._accept(epoch, attempt)
        self._events.keep(events)
        self._worker_pool.send(attempt, {"op": "finish"})

    def set_intervals(self, epoch: int, attempt: int, memory: int, remote: int) -> None:
        """Set the save intervals, in steps; they hold from the step in whose agreement rank 0
        proposes them."""
        self._accept(epoch, attempt)
        self._worker_pool.send(attempt, {"op": "intervals", "steps": (memory, remote)})

    def inject(self, epoch: int, number: int, fault: dict[str, Any]) -> None:
        """Carry out an injected fault. Raises CannotInject."""
        self._accept(epoch)
        self._fault_orders.accept(number, Injection.of(fault))

    def stop_workers(self, epoch: int, events: Events = ()) -> None:
        """Kill every worker: the job has ended. Memory checkpoints stay until `release`."""
        self._accept(epoch)
        self._events.keep(events)
        self._worker_pool.stop()

    def finalize(self, epoch: int, step: int, attempt: int) -> dict[str, Any]:
        """Publish the remote checkpoint of `step`; returns its folder and size."""
        self._accept(epoch)
        return self._saves.finalize(step, attempt, self._io)

    def save_held(self, epoch: int, rank: int, place: Place, attempt: int, step: int) -> None:
        """Save the shard of a lost node to the remote tier, from the memory checkpoint that this
        node holds. Raises NothingHeld, Overwritten or SegmentSpaceError."""
        self._accept(epoch)
        segment = self._memory.find(rank, place)
        commit = segment.find(attempt, step) if segment is not None else None
        if segment is None or commit is None:
            raise NothingHeld(
                f"no step {step} of attempt {attempt} in {place} memory of rank {rank}"
            )
        self._saves.save_held(rank, segment, commit)

    def tidy(
        self,
        epoch: int,
        attempt: int,
        step: int,
        unfinished: tuple[tuple[int, int], ...],
        bad: frozenset[str],
    ) -> None:
        """Apply retention to the remote tier; a signal reports what was removed. `unfinished`:
        (step, attempt) of checkpoints that are still to be published. `bad`: URIs of checkpoints to
        put into quarantine."""
        self._accept(epoch)
        self._cleanup.request(attempt, step, unfinished, bad)

    def beats(self, epoch: int) -> tuple[Beat, ...]:
        """The progress of every rank of this node, according to its beacon."""
        self._accept(epoch)
        return self._watch.beats()

    def inspect(self, epoch: int, attempt: int) -> tuple[Inspection, ...]:
        """Inspect every rank of `attempt` on this node from outside, within `inspect_timeout_s`."""
        self._accept(epoch)
        return self._watch.inspect(attempt)

    def check(self, epoch: int) -> AgentReport:
        """Repeat the check that precedes a node's first use."""
        self._accept(epoch)
        self._health.check(self._io)
        return self.report()

    def exchange(self, epoch: int, host: str, port: int, timeout_s: float) -> str:
        """Exchange bytes with the agent at this address; returns an error message, or ""."""
        self._accept(epoch)
        return exchange(self._config.secret, host, port, timeout_s)

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
                **health.data(),
            )

    def poll(
        self, after_row: tuple[int, int], after_log: int, events: Events = (), acked: int = 0
    ) -> PollAnswer:
        """Metric rows, digests and log lines newer than the cursors, bounded in number; the present
        workers, and saved and failed shards, because signals may be lost; and the ranks' progress.

        `events`: the supervisor's events to keep; events up to `acked` are stored elsewhere.
        """
        self._events.keep(events, acked)
        rows, digests, lines = self._journal.after(after_row, after_log)
        beats = tuple(replace(beat, groups=()) for beat in self._watch.beats())
        saves = self._saves
        return PollAnswer(
            rows,
            digests,
            lines,
            self._worker_pool.reports(),
            saves.shards,
            beats,
            saves.failed_shards,
        )

    def figures(self) -> tuple[tuple[Beat, ...], StepRow | None]:
        """The progress of this node's ranks, and the newest row of metrics that it has."""
        return self._watch.beats(), self._journal.newest()

    def kept_events(self) -> list[dict[str, Any]]:
        """The supervisor's events that this agent keeps, in order of their numbers."""
        return self._events.all()

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

    def on_child_exit(self, child: Child, detail: dict[str, int | str]) -> None:
        """Handle the end of a forked process; `detail` is its exit code or signal."""
        if child.kind in ("worker", "template"):
            self._worker_pool.on_exit(child, detail)
        elif child.kind == "store":
            self._rendezvous.record_port(0)
            self._background.run(self._rendezvous.fork_again, self._io)
        elif child.kind == "saver":
            self._saves.on_exit(child, detail)

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
        self._signals.send(SignalKind.ZYGOTE_LOST, self._attempt, detail={"unfit": unfit})

    # --- internals ------------------------------------------------------------------------------

    def _take_seat(self, order: FormOrder, seat: Seat) -> None:
        self._memory.set_partners(seat.rank, seat.partners, order.attempt)
        join = {
            **join_fields(order, seat, self._config),
            **self._memory.segment_fields(seat.rank),
            "faults": self._fault_orders.pending(seat.rank),
        }
        slot = self._worker_pool.seat(order, seat, join)
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
        failure = {"message": f"{type(error).__name__}: {error}"}
        if isinstance(error, ZygoteFailed):
            failure = {"message": str(error), **error.detail}
        self._log.error("agent_failed", **failure)
        with self._lock:
            self._failure = failure
