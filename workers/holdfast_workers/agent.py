"""The node agent: runs a node's workers, owns its memory checkpoints, and watches.

It obeys one supervisor at a time: a command of an older epoch, or of an attempt lower than one it
was told of, is refused. It takes no decision about the run: it reports what it sees as signals
and does what it is told. All of its workers die with it; its memory checkpoints do not: they are
named segments, which its next incarnation on the same node attaches again.

Threads: `node-io` (children and their messages), those of the data server and the replicator,
a few for slow errands (forks of savers, fetches), and whichever threads call the commands.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast_workers import processes
from holdfast_workers.agent_config import AgentConfig
from holdfast_workers.chaos import FaultPoints
from holdfast_workers.children import Brood, Child, ZygoteFailed
from holdfast_workers.courier import Courier
from holdfast_workers.crew import Crew, Slot, join_fields
from holdfast_workers.errors import StaleCommand
from holdfast_workers.journal import Journal
from holdfast_workers.kept_events import Events, KeptEvents
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.server import DataServer
from holdfast_workers.memory.store import Quarantined, SegmentStore
from holdfast_workers.messages import (
    AgentReport,
    FormOrder,
    LogLine,
    Partner,
    Place,
    Seat,
    Signal,
    SignalKind,
    StepRow,
    Tier,
)
from holdfast_workers.node_io import NodeIO
from holdfast_workers.remote_saves import RemoteSaves
from holdfast_workers.signalling import Teller

STORE_RETRY_S = 1.0
"""A rendezvous store that ends sooner after its start is forked again only after as long."""

RELEASE_WAIT_S = 2.0
"""For killed workers to be gone, before the files that they write are removed."""

STORE_WAIT_S = 2.0
"""How long the answer to a fence waits for a store that is being forked again."""


class NodeAgent:
    """See the module's promise. `on_signal` is called from several threads and must not block."""

    def __init__(self, config: AgentConfig, on_signal: Callable[[Signal], None]) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex[:8]
        self._changed = threading.Condition()
        self._epoch = 0
        self._attempt = 0
        self._started = False
        self._closing = threading.Event()
        self._failure: dict[str, Any] | None = None
        self._store_port = 0
        self._store_forked_at = 0.0
        self._events = KeptEvents()
        self._faults = FaultPoints.from_environment()
        self._teller = Teller(config.agent, self._incarnation, on_signal)
        self._journal = Journal(config.agent, self._incarnation)
        self._errands = ThreadPoolExecutor(4 + 2 * config.capacity, "node-errand")
        self._root = Path(config.memory_root)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store = SegmentStore(self._root, config.mesh_tag, on_bad=self._bad_shard)
        self._server = DataServer(
            self._store, config.secret, config.host, heartbeat_s=config.heartbeat_s
        )
        self._replicator = Replicator(
            self._store, config.secret, on_replicated=self._replicated, on_lost=self._partner_lost
        )
        self._brood = Brood(config.of_zygote, config.zygote_start_timeout_s, config.fork_timeout_s)
        self._saves = RemoteSaves(config, self._root, self._brood, self._teller)
        self._saves.remove_leftovers()
        self._courier = Courier(config.agent, config.secret, self._store, config.form_timeout_s)
        self._crew = Crew(
            config,
            self._incarnation,
            self._brood,
            self._teller,
            self._journal,
            on_standing=self._replicate,
            on_save=self._save,
        )
        self._io = NodeIO(self)
        self._crew.attach(self._io)

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring up zygote, rendezvous store and warm workers. What it raises is reported too."""
        processes.become_subreaper()
        self._io.start()
        try:
            self._brood.start()
            self._io.watch_zygote(self._brood.pid)
            self._fork_store()
            self._crew.fill()
            if not self._await_store(self._config.fork_timeout_s):
                raise TimeoutError(f"no rendezvous store within {self._config.fork_timeout_s} s")
        except Exception as error:
            self._failed(error)
            raise
        self._started = True

    def release(self) -> None:
        """End every process and free every byte of memory this node holds for the job."""
        self._closing.set()
        self._crew.stop(RELEASE_WAIT_S)
        self._io.stop()
        self._brood.stop()
        self._replicator.close()
        self._server.close()
        self._errands.shutdown(wait=False, cancel_futures=True)
        self._store.free_all()
        shutil.rmtree(self._root, ignore_errors=True)

    # --- commands -------------------------------------------------------------------------------

    def hello(self, epoch: int) -> AgentReport:
        """Take `epoch` as the supervisor's. Raises StaleCommand for an older one."""
        self._obey(epoch)
        return self.report()

    def fence(self, epoch: int, attempt: int, events: Events = ()) -> AgentReport:
        """End this node's part in every attempt before `attempt`.

        Returns once no worker here can apply another step of an older attempt: each has parked
        or is dead. Takes at most `abort_grace_s` and the time to reap a killed process. Harmless
        where `attempt` has been formed already. Raises StillThere or DeliveryStuck.
        """
        self._obey(epoch, attempt)
        self._events.keep(events)
        self._server.fence(attempt)
        self._crew.fence(attempt)
        self._replicator.fence(attempt)
        self._courier.fence(attempt)
        self._saves.fence(attempt)
        if self._started:
            self._await_store(STORE_WAIT_S)
        return self.report()

    def form(self, epoch: int, order: FormOrder, events: Events = ()) -> None:
        """Seat the ranks of `order` on this node's workers; they answer by signals."""
        self._obey(epoch, order.attempt)
        self._events.keep(events)
        self._crew.dismiss_unseated(order)
        for seat in order.seats:
            self._take_seat(order, seat)

    def set_partner(self, epoch: int, attempt: int, rank: int, partner: Partner | None) -> None:
        """Replicate `rank` to another partner from now on, without a new attempt."""
        self._obey(epoch, attempt)
        self._replicator.set_partner(rank, partner, attempt=attempt)
        slot = self._crew.with_rank(rank)
        if slot is not None:
            slot.child.send({"op": "partner", "present": partner is not None})
            self._replicate(slot, None)

    def warm_up(self, epoch: int, attempt: int) -> None:
        """Fork workers up to the node's capacity, so that a rank need not wait for a fork."""
        self._obey(epoch, attempt)
        self._crew.fill()

    def stop_workers(self, epoch: int, events: Events = ()) -> None:
        """End every worker; the job is over. Memory stays until `release`."""
        self._obey(epoch)
        self._events.keep(events)
        self._crew.stop()

    def finalize(self, epoch: int, step: int, attempt: int, keep: int) -> dict[str, Any]:
        """Publish the remote checkpoint of `step`: its folder, size and what retention removed."""
        self._obey(epoch)
        return self._saves.finalize(step, attempt, keep, self._io)

    def report(self) -> AgentReport:
        """What this agent is and holds, now."""
        config = self._config
        held = tuple(self._store.held())
        workers = self._crew.reports()
        with self._changed:
            return AgentReport(
                agent=config.agent,
                incarnation=self._incarnation,
                node_id=config.node_id,
                host=config.host,
                pid=os.getpid(),
                data_port=self._server.port,
                store_port=self._store_port,
                capacity=config.capacity,
                epoch=self._epoch,
                attempt=self._attempt,
                ready=self._started and self._store_port > 0,
                workers=workers,
                held=held,
                shards=self._saves.shards,
                domain=config.domain,
                failure=self._failure,
            )

    def poll(
        self, after_row: tuple[int, int], after_log: int, events: Events = (), acked: int = 0
    ) -> tuple[list[StepRow], dict[int, str], list[LogLine]]:
        """Metric rows, digests and log lines newer than the cursors, bounded in number.

        `events` are the supervisor's, to be kept; those up to `acked` are stored elsewhere.
        """
        self._events.keep(events, acked)
        return self._journal.after(after_row, after_log)

    def kept_events(self) -> list[dict[str, Any]]:
        """The supervisor's events that were left here, in order of number."""
        return self._events.all()

    # --- what the I/O thread reports ------------------------------------------------------------

    def worker_said(self, name: str, message: dict[str, Any]) -> None:
        self._crew.said(name, message)

    def child_said(self, child: Child, message: dict[str, Any]) -> None:
        """One message of a store host or saver."""
        if message["op"] == "port":
            with self._changed:
                self._store_port = message["port"]
                self._changed.notify_all()
        elif message["op"] == "saved":
            self._saves.saved(child, message)

    def child_logged(self, child: Child, text: str) -> None:
        attempt, rank = self._crew.whereabouts(child.name)
        self._journal.log(worker=child.name, attempt=attempt, rank=rank, text=text)

    def child_exited(self, child: Child, detail: dict[str, int | str]) -> None:
        """A forked process is gone; `detail` says how."""
        if child.kind == "worker":
            self._crew.exited(child, detail)
        elif child.kind == "store":
            with self._changed:
                self._store_port = 0
            self._errand(self._fork_store_again)
        elif child.kind == "saver":
            self._saves.exited(child, detail)

    def zygote_exited(self) -> None:
        if not self._closing.is_set():
            self._teller.tell(SignalKind.ZYGOTE_LOST, self._attempt)
            self._errand(self._replace_zygote)

    # --- memory tier ----------------------------------------------------------------------------

    def _replicate(self, slot: Slot, computed: int | None) -> None:
        """Offer the state that a worker stands on to its partner."""
        assert slot.rank is not None
        if computed is not None:
            self._faults.reach("replicate", slot.step)
            self._replicator.offer(slot.rank, computed, slot.step)
            return
        for held in self._store.held():
            if (held.rank, held.place, held.step) == (slot.rank, Place.OWN, slot.step):
                self._replicator.offer(slot.rank, held.attempt, held.step)

    def _replicated(self, rank: int, attempt: int, step: int) -> None:
        del attempt  # the attempt that computed the step; the worker is told of its own
        slot = self._crew.with_rank(rank)
        if slot is not None:
            slot.child.send({"op": "replicated", "attempt": slot.attempt, "step": step})

    def _partner_lost(self, rank: int, partner: Partner, why: str) -> None:
        slot = self._crew.with_rank(rank)
        if slot is None or self._closing.is_set():
            return
        slot.child.send({"op": "partner", "present": False})  # never make training wait for it
        self._teller.tell(
            SignalKind.PARTNER_LOST,
            slot.attempt,
            rank,
            slot.name,
            detail={"partner": partner.agent, "why": why},
        )

    def _bad_shard(self, bad: Quarantined) -> None:
        detail = {
            "tier": bad.place.value,
            "place": bad.place.value,
            "step": bad.step,
            "attempt": bad.attempt,
            "message": f"{bad.path.name}: {bad.why}",
        }
        self._teller.tell(SignalKind.BAD_SHARD, self._attempt, bad.rank, detail=detail)

    # --- seats ----------------------------------------------------------------------------------

    def _take_seat(self, order: FormOrder, seat: Seat) -> None:
        self._replicator.set_partner(seat.rank, seat.partner, attempt=order.attempt)
        join = {
            **join_fields(order, seat, self._config),
            "segment_root": str(self._root),
            "segment_path": str(self._store.path(seat.rank, Place.OWN)),
        }
        slot = self._crew.seat(order, seat, join)
        if slot is not None and seat.restore.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM, Tier.LIVE):
            self._errand(self._bring_state, slot, order.attempt, seat)

    def _bring_state(self, slot: Slot, attempt: int, seat: Seat) -> None:
        """See to it that the rank's state lies in its own segment, and tell the worker."""
        answer: dict[str, Any] = {"op": "state", "attempt": attempt, "ok": True, "message": ""}
        try:
            self._courier.bring(attempt, seat.rank, seat.restore)
        except Exception as error:  # told to the worker, which reports it as a failed restore
            answer.update(ok=False, message=f"{type(error).__name__}: {error}")
        slot.child.send(answer)

    # --- small things ---------------------------------------------------------------------------

    def _save(self, message: dict[str, Any]) -> None:
        """A worker left a copy of its state for the remote tier."""
        self._errand(self._saves.save, self._saves.hand_over(message), self._io)

    def _obey(self, epoch: int, attempt: int | None = None) -> None:
        with self._changed:
            if epoch < self._epoch:
                raise StaleCommand(f"epoch {epoch} is older than {self._epoch}")
            if attempt is not None and attempt < self._attempt:
                raise StaleCommand(f"attempt {attempt} is older than {self._attempt}")
            self._epoch = epoch
            self._attempt = max(self._attempt, attempt or 0)

    def _errand(self, body: Callable[..., None], *arguments: Any) -> None:
        """Run something slow elsewhere, so that nobody waits for it."""
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # the pool was shut just now: we end
                self._errands.submit(self._run_errand, body, arguments)

    def _run_errand(self, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            body(*arguments)
        except Exception as error:
            if not self._closing.is_set():
                traceback.print_exc()
                self._failed(error)

    def _await_store(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._store_port > 0, timeout_s)

    def _fork_store(self) -> None:
        self._store_forked_at = time.monotonic()
        self._io.watch(self._brood.fork("store", "store", {"host": self._config.host}))

    def _fork_store_again(self) -> None:
        if time.monotonic() - self._store_forked_at < STORE_RETRY_S:
            self._closing.wait(STORE_RETRY_S)
        if not self._closing.is_set():
            self._fork_store()

    def _replace_zygote(self) -> None:
        self._brood.ensure()
        self._io.watch_zygote(self._brood.pid)

    def _failed(self, error: Exception) -> None:
        """The node cannot run workers any more; its report says so, and why."""
        failure = {"message": f"{type(error).__name__}: {error}"}
        if isinstance(error, ZygoteFailed):
            failure = {"message": str(error), **error.detail}
        with self._changed:
            self._failure = failure
