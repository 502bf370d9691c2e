"""The node agent: runs a node's workers, owns its memory checkpoints, and watches.

It obeys one supervisor at a time: a command of an older epoch, or of an attempt lower than one it
was told of, is refused. It takes no decision about the run: it reports what it sees as signals
and does what it is told. All of its workers die with it; its memory checkpoints do not: they are
named segments, which its next incarnation on the same node attaches again.

Threads: `node-io` (children and their messages), `beat-watch`, `health`, those of the data channel,
a few for slow errands (forks of savers, fetches), and whichever threads call the commands.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig, join_fields
from holdfast_workers.agent.background_tasks import Errands
from holdfast_workers.agent.event_backup import Events, KeptEvents
from holdfast_workers.agent.fork_templates import Templates
from holdfast_workers.agent.json_log import JsonLog
from holdfast_workers.agent.node_health import NodeHealth
from holdfast_workers.agent.node_memory import NodeMemory
from holdfast_workers.agent.progress_watch import BeatWatch
from holdfast_workers.agent.remote_cleanup import Tidier
from holdfast_workers.agent.remote_saves import RemoteSaves
from holdfast_workers.agent.rendezvous import Rendezvous
from holdfast_workers.agent.run_journal import Journal
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.agent.worker_pool import Crew
from holdfast_workers.errors import StaleCommand
from holdfast_workers.fault_injection.kinds import Injection
from holdfast_workers.fault_injection.orders import FaultOrders
from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import Brood, Child, ZygoteFailed, ZygoteProcess, start_zygote
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
    Polled,
    Seat,
    Signal,
    SignalKind,
    StepRow,
)

ZYGOTE_EARLY_S = 30.0
ZYGOTE_LIVES = 3
"""So many zygotes in a row that end so early, and no further one is started: the node is unfit."""

RELEASE_WAIT_S = 2.0
"""For killed workers to be gone, before the files that they write are removed."""

STORE_WAIT_S = 2.0
"""How long the answer to a fence waits for a store that is being forked again."""


class NodeAgent:
    """See the module's promise. `on_signal` is called from several threads and must not block.
    `lose_node()` ends this node and `cut_links(seconds)` takes it off the network, for who injects
    those faults; None: it cannot be done."""

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
        self._events = KeptEvents()
        self._log = JsonLog(
            sys.stderr if config.json_logs else None,
            job=config.job_id,
            agent=config.agent,
            node=config.node_id,
        )
        self._teller = Teller(config.agent, self._incarnation, self._telling(on_signal))
        self._journal = Journal(config.agent, self._incarnation)
        self._errands = Errands(4 + 2 * config.capacity, self._failed, self._closing)
        self._root = Path(config.memory_root)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lease = Lease(self._tell_lease)
        self._memory = NodeMemory(
            config,
            self._root,
            self._teller,
            self._errands.run,
            lambda: self._attempt,
            self._closing,
            on_grant=self._granted,
            on_supervisor_end=lambda epoch: self._lease.supervisor_ended(epoch, clock_s()),
        )
        self._brood = Brood(
            config.of_zygote, config.zygote_start_timeout_s, config.fork_timeout_s, start_zygote
        )
        self._rendezvous = Rendezvous(self._brood, config.host, self._closing)
        self._saves = RemoteSaves(config, self._root, self._brood, self._teller)
        self._saves.remove_leftovers()
        self._tidier = Tidier(config, self._brood, self._teller)
        self._crew = Crew(
            config,
            self._incarnation,
            self._brood,
            Templates(
                self._brood,
                f"{config.agent}.{self._incarnation}",
                config.zygote_start_timeout_s,
                config.fork_timeout_s,
            ),
            self._teller,
            self._journal,
            on_standing=self._memory.offer,
            on_save=self._saves.hand_over,
            on_wanted=self._memory.fill_from_other_mesh,
            on_resharded=self._memory.free_other_meshes,
            on_settled=lambda: self._errands.run(self._crew.stand_by, self._mesh),
        )
        self._memory.attach(self._crew)
        self._io = NodeIO(self)
        self._crew.attach(self._io)
        self._health = NodeHealth(
            config,
            self._brood,
            self._teller,
            lambda: self._attempt,
            lambda: len(self._crew.reports()),
        )
        self._fault_orders = FaultOrders(
            self._root, self._crew.child_of, lose_node, cut_links, self._health.pretend_xid
        )
        self._watch = BeatWatch(config, self._crew.reports, self._teller)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring up zygote, rendezvous store and warm workers. What it raises is reported too."""
        linux_processes.become_subreaper()
        self._io.start()
        self._saves.start(self._io)
        self._tidier.start(self._io)
        self._health.start()
        self._watch.start()
        try:
            self._brood.start()
            self._io.watch_zygote(self._brood.pid)
            self._rendezvous.fork(self._io)
            self._crew.fill()
            self._health.check(self._io)
            if not self._rendezvous.wait(self._config.fork_timeout_s):
                raise TimeoutError(f"no rendezvous store within {self._config.fork_timeout_s} s")
        except Exception as error:
            self._failed(error)
            raise
        self._started = True
        self._log.did("agent_ready", pid=os.getpid(), incarnation=self._incarnation)

    def release(self) -> None:
        """End every process and free every byte of memory this node holds for the job."""
        self._closing.set()
        self._watch.stop()
        self._crew.stop(RELEASE_WAIT_S)
        self._saves.stop()
        self._tidier.stop()
        self._health.stop()
        self._io.stop()
        self._brood.stop()
        self._memory.close()
        self._errands.stop()
        self._memory.free_all()
        shutil.rmtree(self._root, ignore_errors=True)

    # --- commands -------------------------------------------------------------------------------

    def hello(self, epoch: int) -> AgentReport:
        """Take `epoch` as the supervisor's. Raises StaleCommand for an older one."""
        self._obey(epoch)
        return self.report()

    def fence(
        self, epoch: int, attempt: int, events: Events = (), condemned: tuple[str, ...] = ()
    ) -> AgentReport:
        """End this node's part in every attempt before `attempt`.

        Returns once no worker here can apply another step of an older attempt: each has parked
        or is dead; the workers in `condemned` hang, and are killed at once. Takes at most
        `abort_grace_s` and the time to reap a killed process. Harmless where `attempt` has been
        formed already. Raises StillThere or DeliveryStuck.
        """
        self._obey(epoch, attempt)
        self._events.keep(events)
        self._log.did("fenced", attempt=attempt, condemned=condemned or None)
        self._memory.refuse(attempt)
        self._crew.fence(attempt, condemned)
        self._memory.fence(attempt)
        self._saves.fence(attempt)
        if self._started:
            self._rendezvous.wait(STORE_WAIT_S)
        return self.report()

    def form(self, epoch: int, order: FormOrder, events: Events = ()) -> None:
        """Seat the ranks of `order` on this node's workers; they answer by signals."""
        self._obey(epoch, order.attempt)
        self._events.keep(events)
        ranks = [seat.rank for seat in order.seats]
        self._log.did("forming", attempt=order.attempt, ranks=ranks)
        self._crew.dismiss_unseated(order)
        self._memory.turn_to(order.mesh)
        self._mesh = order.mesh
        for seat in order.seats:
            self._take_seat(order, seat)
        self._tell_lease(order.attempt, *self._lease.until(order.attempt))

    def set_partners(
        self, epoch: int, attempt: int, rank: int, partners: tuple[Partner, ...]
    ) -> None:
        """Replicate `rank` to these partners from now on, without a new attempt."""
        self._obey(epoch, attempt)
        self._memory.change_partners(rank, partners, attempt)

    def free_memory(
        self,
        epoch: int,
        attempt: int,
        mesh: dict[str, int],
        own: frozenset[int],
        replicas: frozenset[int],
    ) -> None:
        """Free all memory checkpoints but those of the ranks named of `mesh`, which a standby has
        had no order of: nobody will ask for them. Those of other meshes too."""
        self._obey(epoch, attempt)
        self._memory.free_all_but(mesh, own, replicas)

    def warm_up(self, epoch: int, attempt: int) -> None:
        """Fork workers up to the node's capacity, so that a rank need not wait for a fork."""
        self._obey(epoch, attempt)
        self._crew.fill()

    def finish(self, epoch: int, attempt: int, events: Events = ()) -> None:
        """Let the ranks here wish that all stop after the next agreed step, and save that."""
        self._obey(epoch, attempt)
        self._events.keep(events)
        self._crew.tell(attempt, {"op": "finish"})

    def set_intervals(self, epoch: int, attempt: int, memory: int, remote: int) -> None:
        """How often to save, in steps: counts from the step whose agreement rank 0 brings it to."""
        self._obey(epoch, attempt)
        self._crew.tell(attempt, {"op": "intervals", "steps": (memory, remote)})

    def inject(self, epoch: int, number: int, fault: dict[str, Any]) -> None:
        """Bring about a fault that somebody asked for. Raises CannotInject."""
        self._obey(epoch)
        self._fault_orders.take(number, Injection.of(fault))

    def stop_workers(self, epoch: int, events: Events = ()) -> None:
        """End every worker; the job is over. Memory stays until `release`."""
        self._obey(epoch)
        self._events.keep(events)
        self._crew.stop()

    def finalize(self, epoch: int, step: int, attempt: int) -> dict[str, Any]:
        """Publish the remote checkpoint of `step`: its folder and size."""
        self._obey(epoch)
        return self._saves.finalize(step, attempt, self._io)

    def save_held(self, epoch: int, rank: int, place: Place, attempt: int, step: int) -> None:
        """Save a shard whose own node is gone to the remote tier, from the memory checkpoint that
        is held here. Raises NothingHeld, Overtaken or SegmentSpaceError."""
        self._obey(epoch)
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
        """Apply retention to the remote tier; a signal tells what it removed. `unfinished`, as
        (step, attempt), are still to be published; what is `bad` goes into quarantine."""
        self._obey(epoch)
        self._tidier.ask(attempt, step, unfinished, bad)

    def beats(self, epoch: int) -> tuple[Beat, ...]:
        """How far every rank here has come, as its beacon says."""
        self._obey(epoch)
        return self._watch.beats()

    def inspect(self, epoch: int, attempt: int) -> tuple[Inspection, ...]:
        """Every rank of `attempt` here, seen from outside; takes `inspect_timeout_s` at most."""
        self._obey(epoch)
        return self._watch.inspect(attempt)

    def check(self, epoch: int) -> AgentReport:
        """Check the node as before its first use."""
        self._obey(epoch)
        self._health.check(self._io)
        return self.report()

    def exchange(self, epoch: int, host: str, port: int, timeout_s: float) -> str:
        """Exchange bytes with the agent that listens there: what went wrong, "" if nothing did."""
        self._obey(epoch)
        return exchange(self._config.secret, host, port, timeout_s)

    def report(self) -> AgentReport:
        """What this agent is and holds, now."""
        config = self._config
        held = self._memory.held()
        workers = self._crew.reports()
        health = self._health.report()
        store_port = self._rendezvous.port
        saving = self._saves.saving  # before `shards`: what is saved meanwhile is in both
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
    ) -> Polled:
        """Metric rows, digests and log lines newer than the cursors, bounded in number; and the
        workers and saved shards as they are, for a signal may be lost, and how far ranks have come.

        `events` are the supervisor's, to be kept; those up to `acked` are stored elsewhere.
        """
        self._events.keep(events, acked)
        rows, digests, lines = self._journal.after(after_row, after_log)
        beats = tuple(replace(beat, groups=()) for beat in self._watch.beats())
        return Polled(rows, digests, lines, self._crew.reports(), self._saves.shards, beats)

    def figures(self) -> tuple[tuple[Beat, ...], StepRow | None]:
        """How far the ranks here have come, and the newest step that this node has a row of."""
        return self._watch.beats(), self._journal.newest()

    def kept_events(self) -> list[dict[str, Any]]:
        """The supervisor's events that were left here, in order of number."""
        return self._events.all()

    # --- what the I/O thread reports ------------------------------------------------------------

    def worker_said(self, name: str, message: dict[str, Any]) -> None:
        if message["op"] == "injected":
            self._fault_orders.fired(message["number"])
        else:
            self._crew.said(name, message)

    def child_said(self, child: Child, message: dict[str, Any]) -> None:
        """One message of a store host or saver."""
        if message["op"] == "port":
            self._rendezvous.listens(message["port"])
        elif child.kind == "saver":
            self._saves.said(child, message)

    def child_logged(self, child: Child, text: str) -> None:
        attempt, rank = self._crew.whereabouts(child.name)
        self._journal.log(worker=child.name, attempt=attempt, rank=rank, text=text)
        self._log.wrote(attempt, rank, child.name, text)

    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None:
        """A forked process is gone; `detail` says how."""
        if child.kind in ("worker", "template"):
            self._crew.exited(child, detail)
        elif child.kind == "store":
            self._rendezvous.listens(0)
            self._errands.run(self._rendezvous.fork_again, self._io)
        elif child.kind == "saver":
            self._saves.exited(child, detail)

    def zygote_exited(self) -> None:
        if self._closing.is_set():
            return
        early = self._brood.age_s() < ZYGOTE_EARLY_S
        self._zygotes_lost_early = self._zygotes_lost_early + 1 if early else 0
        unfit = ""
        if self._zygotes_lost_early >= ZYGOTE_LIVES:
            unfit = (
                f"its zygote ended {ZYGOTE_LIVES} times in a row within {ZYGOTE_EARLY_S:g} s of "
                "its start: look for what ends it in the node's system log"
            )
            self._failed(ZygoteFailed(unfit))
        else:
            self._errands.run(self._replace_zygote)
        self._teller.tell(SignalKind.ZYGOTE_LOST, self._attempt, detail={"unfit": unfit})

    # --- small things ---------------------------------------------------------------------------

    def _take_seat(self, order: FormOrder, seat: Seat) -> None:
        self._memory.set_partners(seat.rank, seat.partners, order.attempt)
        join = {
            **join_fields(order, seat, self._config),
            **self._memory.whereabouts(seat.rank),
            "faults": self._fault_orders.due(seat.rank),
        }
        slot = self._crew.seat(order, seat, join)
        if slot is not None:
            self._memory.seated(slot, seat, order.attempt)
            self._fault_orders.hand_on(seat.rank, slot.child)  # some came while it was forked

    def _obey(self, epoch: int, attempt: int | None = None) -> None:
        with self._lock:
            if epoch < self._epoch:
                raise StaleCommand(f"epoch {epoch} is older than {self._epoch}")
            if attempt is not None and attempt < self._attempt:
                raise StaleCommand(f"attempt {attempt} is older than {self._attempt}")
            succeeds = epoch > self._epoch
            self._epoch = epoch
            self._attempt = max(self._attempt, attempt or 0)
        if succeeds:
            self._lease.taken_over(epoch, clock_s())

    def _granted(self, grant: Grant) -> None:
        """A supervisor has heard this agent; an older one's word counts no more."""
        with self._lock:
            current = grant.epoch >= self._epoch and grant.attempt >= self._attempt
        if current:
            self._lease.renew(grant)

    def _tell_lease(self, attempt: int, until: float, number: int) -> None:
        """Never waits for a worker that does not read: this may be the data server's thread, and
        the next word says the same and more."""
        word = {"op": "lease", "until": until, "number": number}
        self._crew.tell(attempt, word, wait=False)

    def _telling(self, on_signal: Callable[[Signal], None]) -> Callable[[Signal], None]:
        def tell(signal: Signal) -> None:
            self._log.signalled(signal)
            on_signal(signal)

        return tell

    def _replace_zygote(self) -> None:
        self._brood.ensure()
        self._io.watch_zygote(self._brood.pid)

    def _failed(self, error: Exception) -> None:
        """The node cannot run workers any more; its report says so, and why."""
        failure = {"message": f"{type(error).__name__}: {error}"}
        if isinstance(error, ZygoteFailed):
            failure = {"message": str(error), **error.detail}
        self._log.did("agent_failed", "error", **failure)
        with self._lock:
            self._failure = failure
