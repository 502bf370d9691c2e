"""The node agent: runs a node's workers, owns its memory checkpoints, and watches.

It obeys one supervisor at a time: it refuses commands of an older epoch, or of an attempt lower
than the highest that it received. It takes no decision about the run: it reports its observations
as signals and carries out commands. All of its workers die with it. Its memory checkpoints do not:
they are named segments, and the next incarnation on the same node attaches them again.

Threads: `node-io` (children and their messages), `beat-watch`, `health`, `upkeep`, those of the
data channel, a few for slow background tasks (forks, fetches), and those that call the commands.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdfast_workers import build
from holdfast_workers.agent.agent_config import AgentConfig, join_order
from holdfast_workers.agent.authority import Authority
from holdfast_workers.agent.background_threads import BackgroundTasks, PeriodicThread
from holdfast_workers.agent.child_events import ChildEvents
from holdfast_workers.agent.fork_templates import ForkTemplates
from holdfast_workers.agent.node_health import NodeHealth
from holdfast_workers.agent.node_log import logged, node_log
from holdfast_workers.agent.node_memory import NodeMemory
from holdfast_workers.agent.progress_watch import ProgressWatch
from holdfast_workers.agent.remote_saves import RemoteSaves, RemoteTierRefused
from holdfast_workers.agent.rendezvous import Rendezvous
from holdfast_workers.agent.run_journal import EventBackup, RunJournal
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.agent.storage_jobs import RemoteCleanup, RemoteLoads
from holdfast_workers.agent.supervisor_end import SupervisorEnd
from holdfast_workers.agent.token_fetching import TokenFetching
from holdfast_workers.agent.worker_pool import WorkerPool
from holdfast_workers.errors import WorkersError
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.fault_injection.orders import FaultOrders, NodeMeans
from holdfast_workers.ipc import environment, linux_processes
from holdfast_workers.ipc.children import (
    ChildProcesses,
    ZygoteFailed,
    ZygoteProcess,
    start_zygote,
)
from holdfast_workers.ipc.orphans import Orphans
from holdfast_workers.memory.link_probe import exchange
from holdfast_workers.memory.node_folder import NodeFolder
from holdfast_workers.memory.segment_store import NothingHeld
from holdfast_workers.protocol import codec, commands
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
    Refusal,
)
from holdfast_workers.protocol.messages import Beat, FormOrder, Seat, StepRow
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.processes import (
    WORKER_ORDERS,
    LeaseUpdate,
    NewIntervals,
    StopAfterStep,
    StoreJob,
    TidierJob,
    WorkerJob,
)
from holdfast_workers.protocol.signals import Signal, StoreLost, ZygoteLost
from holdfast_workers.training.skipped_windows import Ledger

RELEASE_WAIT_S = 2.0
"""The time for killed workers to exit before the files that they write are removed."""

INSTALL_TRIES, INSTALL_PAUSE_S = 3, 5.0
"""The tries to install the job's packages, and the pause between two."""
REOPEN_S = 2.0
"""Between two attempts of an agent to use an unusable node."""

UPKEEP_S = 5.0
"""Between two searches for what ended processes left on this node."""

STORE_WAIT_S = 2.0
"""How long a fence waits for an answer of the rendezvous store, which may be forked again."""


class UnusableNode(WorkersError):
    """This node refuses what an agent needs."""


class NodeAgent:
    """See the module's promise. `on_signal` is called from several threads and must not block.
    The constructor never raises: if the node is unusable, the reports say so.
    `lose_node()` ends this node, for fault injection; None: it cannot. `has_ended(process)` says
    whether the cluster knows that the supervisor's process on another node has ended; it may block.
    """

    def __init__(
        self,
        config: AgentConfig,
        on_signal: Callable[[Signal], None],
        lose_node: Callable[[], None] | None = None,
        start_zygote: Callable[[int, dict[str, str]], ZygoteProcess] = start_zygote,
        has_ended: Callable[[ProcessIdentity], bool] = lambda _: False,
    ) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex[:8]
        self._mesh = config.plan.mesh
        self._started = False
        self._closing = threading.Event()
        self._failure: AgentFailure | None = None
        self._events = EventBackup()
        self._log = node_log(config.json_logs)
        self._signals = SignalSender(config.agent, self._incarnation, logged(self._log, on_signal))
        self._journal = RunJournal(config.agent, self._incarnation)
        self._background = BackgroundTasks(
            4 + 2 * config.capacity, self._record_failure, self._closing
        )
        self._root = Path(config.memory_root)
        base = Path(config.memory_base) if config.memory_base else None
        self._folder = NodeFolder(self._root, base, os.getppid())
        self._authority = Authority(self._send_lease)
        self._supervisor_end = SupervisorEnd(self._authority.lease, has_ended, self._closing)
        self._memory = NodeMemory(
            config,
            self._root,
            self._signals,
            self._background.run,
            lambda: self._authority.attempt,
            self._closing,
            on_grant=self._authority.renew_lease,
            on_lifeline_end=self._supervisor_end.lifeline_ended,
        )
        self._child_processes = ChildProcesses(
            config.zygote_config,
            config.plan.zygote_start_timeout_s,
            config.fork_timeout_s,
            start_zygote,
            on_threads=self._on_threads,
        )
        self._storage_processes = ChildProcesses(
            config.storage_zygote_config,
            config.plan.zygote_start_timeout_s,
            config.fork_timeout_s,
            start_zygote,
            lambda node: environment.for_storage(node, str(Path.cwd())),
        )
        savers = self._storage_processes if config.saves_to_bucket else self._child_processes
        self._rendezvous = Rendezvous(
            self._child_processes,
            StoreJob(config.host, config.ports),
            self._closing,
            on_lost=lambda port: self._signals.send(StoreLost(port), self._authority.attempt),
        )
        self._saves = RemoteSaves(config, self._root, savers, self._signals)
        self._worker_pool = WorkerPool(
            config,
            self._incarnation,
            self._child_processes,
            ForkTemplates(
                self._child_processes,
                f"{config.agent}.{self._incarnation}",
                config.plan.zygote_start_timeout_s,
                config.fork_timeout_s,
            ),
            self._signals,
            self._journal,
            on_state_held=self._memory.offer,
            on_save=self._saves.take_over,
            on_load=lambda *load: self._background.run(self._loads.load, *load),
            on_segment_ready=self._memory.fill_from_other_mesh,
            on_resharded=self._memory.free_other_meshes,
            on_first_step=lambda: self._background.run(self._worker_pool.fork_spares, self._mesh),
        )
        self._memory.attach(self._worker_pool)
        self._health = NodeHealth(
            config,
            self._child_processes,
            self._signals,
            lambda: self._authority.attempt,
            lambda: len(self._worker_pool.reports()),
            lambda: any(worker.rank is not None for worker in self._worker_pool.reports()),
        )
        self._fault_orders = FaultOrders(
            self._worker_pool.child_of,
            NodeMeans(self._root, lambda: self._memory.port, self._health.inject_xid, lose_node),
            runs_program=config.brings_program,
        )
        self._fetching = TokenFetching(config, self._storage_processes, self._closing)
        children = ChildEvents(
            self._child_processes,
            self._worker_pool,
            self._rendezvous,
            self._saves,
            self._fault_orders,
            self._journal,
            self._fetching,
            self._background,
            self._closing,
            self._log,
            self._on_zygote_lost,
        )
        self._io = children.io
        self._loads = RemoteLoads(config, self._storage_processes, self._io)
        self._cleanup = RemoteCleanup(config, savers, self._io, self._signals, self._closing)
        self._worker_pool.attach(self._io)
        self._watch = ProgressWatch(
            config, self._worker_pool.reports, self._signals, self._fetching.read_from
        )
        self._orphans = Orphans(self._owns_child)
        self._upkeep = PeriodicThread("upkeep", UPKEEP_S, self._clean_up)
        self._handlers = self._handlers_by_command()
        self._usable = self._open()

    # --- start and end --------------------------------------------------------------------------

    def start(self) -> None:
        """Start zygote, rendezvous store and warm workers. An exception is also in later
        reports. On an unusable node this waits until the node is usable, or the agent ends."""
        while not self._usable:
            if self._closing.wait(REOPEN_S):
                return
            self._usable = self._open()
        self._install_packages()  # before this process reaps its children
        linux_processes.become_subreaper()
        codec.prepare(*WORKER_ORDERS, *WorkerJob.answers)
        self._io.start()
        self._saves.start(self._io)
        self._health.start()
        self._watch.start()
        self._upkeep.start()
        if self._config.saves_to_bucket:
            self._background.run(self._start_storage_processes)
        if self._config.reads_token_sets:
            self._background.run(self._fetching.fork, self._io)
        try:
            self._child_processes.start()
            self._rendezvous.fork(self._io)  # a zygote that cannot be forked is replaced here
            self._io.watch_zygote(self._child_processes.pid)
            self._worker_pool.fill()
            self._health.check(self._io)
            if not self._rendezvous.wait_answer(self._config.fork_timeout_s):
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
        self._upkeep.stop(RELEASE_WAIT_S)
        self._worker_pool.stop(RELEASE_WAIT_S)
        self._saves.stop()
        self._health.stop()
        self._io.stop()
        self._child_processes.stop()
        self._storage_processes.stop()
        self._memory.close()
        self._background.stop()
        self._memory.free_all()
        self._folder.remove()

    # --- commands -------------------------------------------------------------------------------

    def execute(self, request: commands.Request) -> Answer:
        """Carry out a command, or answer a query, and keep the events that came with it.

        Raises StaleCommand if a newer supervisor was accepted, or the command belongs to an attempt
        older than the newest; any other error of a command.
        """
        self._authority.accept(request.epoch, request.command)
        if isinstance(request.command, commands.Hello):
            self._supervisor_end.introduce(request.epoch, request.command.supervisor)
        self._events.keep(request.events)
        return self._handlers[type(request.command)](request.command)

    def answer(self, request: commands.Request) -> Answer | Refusal:
        """Do as `execute` does, but answer an error too: the supervisor may be of another
        version."""
        try:
            return self.execute(request)
        except Exception as error:
            self._log.warning("refused", command=request.command.kind, exc_info=True)
            later = isinstance(error, RemoteTierRefused)
            return Refusal(type(error).__name__, str(error), later)

    def _handlers_by_command(
        self,
    ) -> dict[type[commands.Command | commands.Query], Callable[[Any], Answer]]:
        return {
            commands.Fence: self._fence,
            commands.Form: self._form,
            commands.WarmUp: self._warm_up,
            commands.SetPartners: self._set_partners,
            commands.FreeMemory: self._free_memory,
            commands.SetIntervals: self._set_intervals,
            commands.Finish: self._finish,
            commands.PrepareMesh: self._prepare_mesh,
            commands.Leave: self._leave,
            commands.Inspect: self._inspect,
            commands.SaveShard: self._save_held,
            commands.FinalizeCheckpoint: self._finalize,
            commands.TidyRemoteTier: self._tidy,
            commands.CheckNode: self._check,
            commands.InjectFault: self._inject,
            commands.Stop: self._stop,
            commands.Hello: lambda _: self.report(),
            commands.Describe: lambda _: self.report(),
            commands.Poll: self._poll,
            commands.ListEvents: lambda _: KeptEvents(self._events.all()),
            commands.ExchangeBytes: self._exchange,
        }

    def _fence(self, command: commands.Fence) -> AgentReport:
        """End this node's part in every attempt before the command's.

        Returns once no worker of this node can apply another step of an older attempt: each has
        parked or is dead. Takes at most `abort_grace_s` plus the time to reap a killed process.
        Harmless if the attempt has already been formed. Raises WorkerStillAlive or DeliveryStuck.
        """
        attempt = command.attempt
        self._log.info("fenced", attempt=attempt, condemned=command.condemned or None)
        self._memory.refuse(attempt)
        self._fetching.fetch_from(command.caches)
        self._worker_pool.fence(attempt, command.condemned)
        self._memory.fence(attempt)
        self._saves.fence(attempt)
        # Programs use no prefix of keys, so each attempt gets its own store.
        own_store = attempt if self._config.brings_program else 0
        if self._started:
            self._rendezvous.wait_answer(STORE_WAIT_S, own_store)
        else:  # `start` waits for it
            self._rendezvous.ask(own_store)
        return self.report()

    def _form(self, command: commands.Form) -> Done:
        order = command.order
        ranks = [seat.rank for seat in order.seats]
        self._log.info("forming", attempt=order.attempt, ranks=ranks)
        self._worker_pool.end_unseated(order)
        self._memory.use_mesh(order.mesh)
        self._mesh = order.mesh
        self._fetching.fetch_from(order.caches)
        for seat in order.seats:
            first_step = seat.restore.step + 1
            self._fetching.read_from(Ledger.of(order.skipped).window(first_step))
            self._take_seat(order, seat)
        self._send_lease(order.attempt, *self._authority.lease_until(order.attempt))
        return Done()

    def _warm_up(self, command: commands.WarmUp) -> Done:
        self._fetching.fetch_from(command.caches)
        self._fetching.read_from(None)
        self._worker_pool.fill()
        return Done()

    def _set_partners(self, command: commands.SetPartners) -> Done:
        self._memory.change_partners(command.rank, command.partners, command.attempt)
        return Done()

    def _free_memory(self, command: commands.FreeMemory) -> Done:
        self._memory.free_all_but(command.mesh, command.own, command.replicas)
        return Done()

    def _set_intervals(self, command: commands.SetIntervals) -> Done:
        steps = (command.memory, command.remote)
        self._worker_pool.send(NewIntervals(command.attempt, steps))
        return Done()

    def _finish(self, command: commands.Finish) -> Done:
        self._worker_pool.send(StopAfterStep(command.attempt))
        return Done()

    def _prepare_mesh(self, command: commands.PrepareMesh) -> Done:
        """Raises ZygoteFailed."""
        self._worker_pool.prepare(command.mesh, command.ranks, self._mesh)
        return Done()

    def _leave(self, command: commands.Leave) -> Done:
        self._worker_pool.send(StopAfterStep(command.attempt, leaves=True))
        return Done()

    def _inspect(self, command: commands.Inspect) -> Inspections:
        """Takes at most `inspect_timeout_s`."""
        return Inspections(self._watch.inspect(command.attempt))

    def _save_held(self, command: commands.SaveShard) -> Done:
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

    def _finalize(self, command: commands.FinalizeCheckpoint) -> PublishedCheckpoint:
        return self._saves.finalize(command, self._io)

    def _tidy(self, command: commands.TidyRemoteTier) -> Done:
        self._cleanup.request(TidierJob(command, self._authority.epoch))
        return Done()

    def _check(self, _: commands.CheckNode) -> AgentReport:
        self._health.check(self._io)
        return self.report()

    def _inject(self, command: commands.InjectFault) -> Done:
        """Raises CannotInject."""
        self._fault_orders.accept(command.number, Injection.of(command.fault))
        return Done()

    def _stop(self, _: commands.Stop) -> Done:
        self._worker_pool.stop()
        return Done()

    def _poll(self, command: commands.Poll) -> PollAnswer:
        self._events.forget(command.acked)
        rows, digests = self._journal.after(command.after_row)
        lines, left = self._journal.lines_after(
            command.after_line, command.stored_line, command.most_lines
        )
        beats = tuple(replace(beat, groups=()) for beat in self._watch.beats())
        return PollAnswer(
            rows,
            {step: digest for step, (_, digest) in digests.items()},
            lines,
            self._worker_pool.reports(),
            self._saves.shards,
            beats,
            self._saves.failed_shards,
            {step: attempt for step, (attempt, _) in digests.items()},
            self._health.report(),
            left,
        )

    def _exchange(self, command: commands.ExchangeBytes) -> ExchangeResult:
        problem = exchange(
            self._config.secret, command.host, command.port, command.timeout_s, self._memory.tls
        )
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
        return AgentReport(
            agent=config.agent,
            incarnation=self._incarnation,
            node_id=config.node_id,
            host=config.host,
            pid=os.getpid(),
            data_port=self._memory.port,
            store_port=store_port,
            capacity=config.capacity,
            epoch=self._authority.epoch,
            attempt=self._authority.attempt,
            ready=self._started and store_port > 0,
            workers=workers,
            held=held,
            shards=self._saves.shards,
            saving=saving,
            domain=config.domain,
            fast_domain=config.fast_domain,
            failure=self._failure or self._store_failure(),
            health=health,
            process=linux_processes.identify(os.getpid(), config.node_id),
            build=build.LOADED,
        )

    def figures(self) -> tuple[tuple[Beat, ...], StepRow | None]:
        """The progress of this node's ranks, and the newest row of metrics that it has."""
        return self._watch.beats(), self._journal.newest()

    # --- internals ------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Take what the node may refuse. False: it did, and the reports say why. An exception would
        be the constructor's, and cost the agent's seat for ever."""
        try:
            if self._config.problem:
                raise UnusableNode(self._config.problem)
            self._folder.take()
            self._memory.open()
            self._saves.remove_leftovers()
            self._journal.keep_in(self._root)
        except Exception as error:
            self._record_failure(error)
            return False
        self._failure = None
        return True

    def _install_packages(self) -> None:
        """Another node has installed the same, so a failure may pass. Raises PackagesFailed."""
        config = self._config
        if not config.plan.packages:
            return
        from holdfast_workers.packages.installation import install  # few jobs need it

        began = time.monotonic()
        for tries_left in reversed(range(INSTALL_TRIES)):
            left_s = began + config.plan.timeouts.install_s - time.monotonic()
            try:
                install(config.plan.packages, Path(config.cache_dir), left_s, self._closing)
                break
            except Exception as error:
                self._log.warning("packages_not_installed", why=str(error))
                if not tries_left or self._closing.wait(INSTALL_PAUSE_S):
                    self._record_failure(error)
                    raise
        self._log.info("packages_installed", took_s=time.monotonic() - began)

    def _take_seat(self, order: FormOrder, seat: Seat) -> None:
        self._memory.set_partners(seat.rank, seat.partners, order.attempt)
        join = join_order(order, seat, self._memory.own_segment(seat.rank))
        slot = self._worker_pool.seat(order, seat, join, self._fault_orders.pending(seat.rank))
        if slot is not None:
            self._memory.on_seated(slot, seat, order.attempt, order.world_size)
            self._fault_orders.send_pending(seat.rank, slot.child)  # ordered during its fork

    def _send_lease(self, attempt: int, until: float, number: int) -> None:
        """Send the lease to the workers. A worker that does not read it is left alone: the next
        message supersedes this one."""
        self._worker_pool.send(LeaseUpdate(attempt, until, number), or_drop=True)

    def _clean_up(self) -> None:
        self._orphans.reap()
        for path in self._folder.free_orphans():
            self._log.info("orphan_memory_freed", folder=str(path))

    def _owns_child(self, pid: int) -> bool:
        zygotes = (self._child_processes.pid, self._storage_processes.pid)
        return self._io.watches(pid) or pid in zygotes

    def _on_zygote_lost(self, error: ZygoteFailed | None) -> None:
        if error is not None:
            self._record_failure(error)
        self._signals.send(ZygoteLost(str(error or "")), self._authority.attempt)

    def _on_threads(self, modules: tuple[str, ...]) -> None:
        self._log.warning("zygote_has_threads", started_by=modules)
        text = (
            f"WARNING threads were started by {', '.join(modules)}. A process with "
            "threads cannot be forked, so each worker imports the recipe itself: it starts later."
        )
        self._journal.log(worker="zygote", attempt=0, rank=None, text=text)

    def _start_storage_processes(self) -> None:
        """Start them before the first save, which is not to wait for the imports. A failure does
        not condemn the node: each save or load tries again."""
        try:
            self._storage_processes.ensure()
        except ZygoteFailed:
            self._log.exception("the zygote for the storage did not start")

    def _store_failure(self) -> AgentFailure | None:
        problem = self._rendezvous.problem
        return AgentFailure(problem) if problem else None

    def _record_failure(self, error: Exception) -> None:
        """Record in this agent's reports that the node cannot run workers any more, and why."""
        failure = AgentFailure(f"{type(error).__name__}: {error}")
        if isinstance(error, ZygoteFailed):
            failure = error.failure
        if failure != self._failure:
            self._log.error("agent_failed", **asdict(failure))
        self._failure = failure
