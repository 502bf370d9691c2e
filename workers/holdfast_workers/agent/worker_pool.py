"""The workers of one node: who they are, what they do, how they are fenced and seated.

Kept in step by the workers' own messages and exits; turned into signals here. A worker is `warm`
(forked, no rank), `joining`, `training`, `parked` (left its attempt), or `done`. Its slot goes
when its process does.
"""

from __future__ import annotations

import os
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.fork_templates import Place, Templates
from holdfast_workers.agent.oom_kills import MemoryShortage
from holdfast_workers.agent.run_journal import Journal
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.errors import StaleCommand, WorkersError
from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.children import Brood, Child
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.progress import beacon
from holdfast_workers.protocol.messages import (
    FormOrder,
    Restore,
    Seat,
    SignalKind,
    StepRow,
    Tier,
    WorkerReport,
    WorkerState,
)

EXIT_WAIT_S = 5.0
LOOK_S = 0.02


class StillThere(WorkersError):
    """A worker has neither left its attempt nor died of SIGKILL in time: no fence is proven."""


@dataclass
class Slot:
    """What is known of one worker."""

    child: Child
    state: WorkerState = WorkerState.WARM
    attempt: int = 0
    rank: int | None = None
    step: int = 0
    parked_for: int = 0
    """The highest attempt this worker has made way for."""
    restore: Restore | None = None
    failure: dict[str, Any] | None = None
    """What it told when its attempt failed under it."""
    expected: int | None = None
    """The only rank that it may be given."""
    killed_because: str = ""
    """Why its own agent killed it, if it did."""

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def has_joined(self) -> bool:
        """Whether it stands on the state that its order named, or on a later one."""
        return self.state in (WorkerState.TRAINING, WorkerState.DONE)


class Crew:
    """`on_standing(slot)`: a worker's newest state in memory is that of `slot.step`, computed by
    attempt `computed` (None: it is what the segment says). `on_save(message)`: a copy
    for the remote tier lies ready. `on_wanted(slot, attempt, own)`: the worker has made its
    segment, to be filled from another mesh; `own` is what belongs to its rank alone.
    `on_resharded()`: the whole world holds that state by now, at its partners too. `on_settled()`:
    no worker here is on its way into an attempt any more."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        brood: Brood,
        templates: Templates,
        teller: Teller,
        journal: Journal,
        on_standing: Callable[[Slot, int | None], None],
        on_save: Callable[[dict[str, Any]], None],
        on_wanted: Callable[[Slot, int, dict[str, bytes]], None],
        on_resharded: Callable[[], None],
        on_settled: Callable[[], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._brood = brood
        self._templates = templates
        self._teller = teller
        self._journal = journal
        self._on_standing = on_standing
        self._hand_to_saver = on_save
        self._on_wanting = on_wanted
        self._on_resharded = on_resharded
        self._on_settled = on_settled
        self._shortage = MemoryShortage()
        self._io: NodeIO | None = None
        self._changed = threading.Condition()
        self._slots: dict[str, Slot] = {}
        self._forking = threading.Lock()
        self._forked = 0
        self._fenced = 0
        self._closing = False

    def attach(self, io: NodeIO) -> None:
        """Name the thread that watches the workers from now on."""
        self._io = io
        self._templates.attach(io)

    # --- orders ---------------------------------------------------------------------------------

    def fork(self) -> str:
        """Fork one worker; its name. Raises ZygoteFailed."""
        with self._forking:
            return self._fork()

    def _fork_for(self, order: FormOrder, rank: int) -> str:
        place = {"mesh": order.mesh, "rank": rank}
        with self._forking:
            return self._fork(place if self._templates.has(Place.of(place)) else None)

    def fill(self) -> None:
        """Fork workers until the node has as many as it can run. May be called by several."""
        while True:
            with self._forking:
                if self._closing or len(self._slots) >= self._config.capacity:
                    return
                self._fork()

    def stand_by(self, mesh: dict[str, int]) -> None:
        """Fork a spare worker for each rank of a world of `mesh` that is here, and for as many as
        the node keeps some for; each has what can be built ahead for its rank, from the rank's
        template. May be called by several."""
        ranks = self._ranks_with_spares()
        self._templates.ensure([Place.of({"mesh": mesh, "rank": rank}) for rank in ranks])
        while True:
            with self._forking:
                with self._changed:
                    slots = tuple(self._slots.values())
                waited_for = {one.expected for one in slots if one.state is WorkerState.WARM}
                short = [rank for rank in self._ranks_with_spares() if rank not in waited_for]
                if self._closing or not short:
                    return
                self._fork({"mesh": mesh, "rank": short[0]})

    def _ranks_with_spares(self) -> list[int]:
        with self._changed:
            ranks = {one.rank for one in self._slots.values() if one.rank is not None}
        return sorted(ranks)[: self._config.ranks_with_spares]

    def fence(self, attempt: int, condemned: Collection[str] = ()) -> None:
        """Return once every worker has left all attempts before `attempt`, parked or dead. One
        that never had a rank has none to leave.

        The workers in `condemned` are not asked: they were seen to hang.
        Those that have a seat in `attempt` already are left alone, however late this comes; and
        from here on nobody gets a seat in an older one. Raises StillThere.
        """
        with self._changed:
            self._fenced = max(self._fenced, attempt)
            slots = {name: slot for name, slot in self._slots.items() if slot.attempt < attempt}
        for slot in slots.values():
            if slot.name in condemned:
                self._kill_straggler(slot, "was seen to hold up the others")
            elif self._config.reform == "fork" and slot.state is not WorkerState.WARM:
                slot.child.kill()
            else:
                slot.child.send({"op": "fence", "attempt": attempt})
        slots = {name: slot for name, slot in slots.items() if slot.attempt}
        if self._wait_parked(slots, attempt, LOOK_S):
            return
        self._kill_stragglers(slots, attempt)
        if not self._wait_parked(slots, attempt, EXIT_WAIT_S):
            names = ", ".join(self._unparked(slots, attempt))
            raise StillThere(f"{names} did not die within {EXIT_WAIT_S} s of being killed")

    def seat(self, order: FormOrder, seat: Seat, join: dict[str, Any]) -> Slot | None:
        """Give a rank to its worker. None if the worker is gone: a signal says so.

        Raises StaleCommand once a newer attempt was announced, also if that was just now.
        """
        name = seat.worker if seat.worker is not None else self._fork_for(order, seat.rank)
        with self._changed:
            self._refuse_stale(order)
            slot = self._slots.get(name)
            if slot is not None:
                slot.state, slot.attempt, slot.rank = WorkerState.JOINING, order.attempt, seat.rank
                slot.restore, slot.failure = seat.restore, None
        if slot is None:  # died between the fence's answer and this order
            detail = {"why": "the worker was gone before it could take its rank"}
            self._teller.tell(
                SignalKind.WORKER_EXITED, order.attempt, seat.rank, name, detail=detail
            )
            return None
        slot.child.send({"op": "join", "attempt": order.attempt, "rank": seat.rank, **join})
        return slot

    def dismiss_unseated(self, order: FormOrder) -> None:
        """End the workers that the order does not name, but for spare ones: they are not needed
        any more."""
        seated = {seat.worker for seat in order.seats}
        with self._changed:
            self._refuse_stale(order)
            unseated = [name for name in self._slots if name not in seated]
            spare = [name for name in unseated if self._may_wait(self._slots[name], order)]
            children = [self._slots.pop(name).child for name in unseated if name not in spare]
        for child in children:
            child.kill()
        here = [{"mesh": order.mesh, "rank": seat.rank} for seat in order.seats]
        self._templates.keep({Place.of(one) for one in here})

    def tell(self, attempt: int, message: dict[str, Any], *, wait: bool = True) -> None:
        """Send `message` to every worker with a rank in `attempt`; without `wait`, to those that
        have room for it."""
        with self._changed:
            slots = [slot for slot in self._slots.values() if slot.attempt == attempt]
        for slot in slots:
            slot.child.send({**message, "attempt": attempt}, wait=wait)

    def stop(self, wait_s: float = 0.0) -> None:
        """End every worker, and wait a little for them to be gone; their exits are no news."""
        with self._changed:
            self._closing = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.child.kill()
        self._templates.stop(wait_s)
        with self._changed:
            self._changed.wait_for(lambda: not self._slots, wait_s)

    # --- looking --------------------------------------------------------------------------------

    def reports(self) -> tuple[WorkerReport, ...]:
        with self._changed:
            return tuple(
                WorkerReport(
                    n, s.child.pid, s.state, s.attempt, s.rank, s.step, s.failure, s.expected
                )
                for n, s in self._slots.items()
            )

    def with_rank(self, rank: int) -> Slot | None:
        """The worker that holds `rank` in the newest attempt it has a part in."""
        with self._changed:
            holders = [slot for slot in self._slots.values() if slot.rank == rank]
        return max(holders, key=lambda slot: slot.attempt, default=None)

    def child_of(self, rank: int) -> Child | None:
        slot = self.with_rank(rank)
        return slot.child if slot is not None else None

    def whereabouts(self, name: str) -> tuple[int, int | None]:
        """(attempt, rank) of a worker; (0, None) if it is unknown."""
        with self._changed:
            slot = self._slots.get(name)
        return (slot.attempt, slot.rank) if slot else (0, None)

    # --- what workers say -----------------------------------------------------------------------

    def said(self, name: str, message: dict[str, Any]) -> None:
        """One message of a worker; called by the I/O thread."""
        with self._changed:
            slot = self._slots.get(name)
        if slot is not None:
            getattr(self, f"_on_{message['op']}")(slot, message)

    def exited(self, child: Child, detail: dict[str, int | str]) -> None:
        """A worker's process, or a template's, is gone. A fence that waits for a worker's end
        answers after it was told."""
        if child.kind == "template":
            self._templates.exited(child)
            return
        with self._changed:
            slot = self._slots.get(child.name)
        self._beacon_of(child.name).unlink(missing_ok=True)
        if slot is not None and not self._closing:
            self._tell_end(slot, detail)
        with self._changed:
            self._slots.pop(child.name, None)
            self._changed.notify_all()

    def _on_hello(self, slot: Slot, message: dict[str, Any]) -> None:
        """Nothing to do: a slot is warm from its fork on."""

    def _on_joined(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.state, slot.step = WorkerState.TRAINING, message["step"]
            settled = all(one.state is not WorkerState.JOINING for one in self._slots.values())
        self._on_standing(slot, None)
        detail = _picked(message, "step", "tier", "phases_s")
        self._tell(SignalKind.WORKER_JOINED, slot, message, detail)
        if settled:
            self._on_settled()

    def _on_committed(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.step = message["step"]
        self._on_standing(slot, message["attempt"])

    def _on_row(self, slot: Slot, message: dict[str, Any]) -> None:
        row = StepRow(**{**message["row"], "compute_s": tuple(message["row"]["compute_s"])})
        with self._changed:
            slot.step, restore = row.step, slot.restore
            resharded = (
                restore is not None
                and restore.tier is Tier.RESHARD
                and row.protected_step >= restore.step
            )
            if resharded:
                slot.restore = None
        if resharded:
            self._on_resharded()
        if self._journal.add_row(row):
            detail = {"step": row.step, "at": row.at}
            self._tell(SignalKind.FIRST_STEP, slot, message, detail)

    def _on_tripped(self, slot: Slot, message: dict[str, Any]) -> None:
        self._tell(SignalKind.GUARD_TRIPPED, slot, message, message["report"])

    def _on_digest(self, _: Slot, message: dict[str, Any]) -> None:
        self._journal.add_digest(message["step"], message["digest"])

    def _on_recomputed(self, slot: Slot, message: dict[str, Any]) -> None:
        self._tell(SignalKind.RECOMPUTED, slot, message, _picked(message, "step", "digests"))

    def _on_save(self, _: Slot, message: dict[str, Any]) -> None:
        self._hand_to_saver(message)

    def _on_unsaved(self, slot: Slot, message: dict[str, Any]) -> None:
        self._tell(SignalKind.SHARD_FAILED, slot, message, _picked(message, "step", "message"))

    def _on_wanted(self, slot: Slot, message: dict[str, Any]) -> None:
        own = {name: b64decode(text) for name, text in message["own"].items()}
        self._on_wanting(slot, message["attempt"], own)

    def _on_failed(self, slot: Slot, message: dict[str, Any]) -> None:
        fields = _picked(message, "kind", "type", "message", "traceback", "step")
        detail = {"error": fields, **_picked(message, "step", "trip", "finding")}
        with self._changed:
            slot.failure = detail
        self._tell(SignalKind.WORKER_FAILED, slot, message, detail)

    def _on_parked(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.parked_for = max(slot.parked_for, message["attempt"])
            if slot.attempt < message["attempt"] and slot.state is not WorkerState.WARM:
                slot.state = WorkerState.PARKED
            self._changed.notify_all()

    def _on_done(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.state, slot.step = WorkerState.DONE, message["step"]
        self._tell(SignalKind.WORKER_DONE, slot, message, {"step": message["step"]})

    # --- small things ---------------------------------------------------------------------------

    def _tell(
        self, kind: SignalKind, slot: Slot, message: dict[str, Any], detail: dict[str, Any]
    ) -> None:
        attempt, rank = message["attempt"], message["rank"]
        self._teller.tell(kind, attempt, rank, slot.name, pid=slot.child.pid, detail=detail)

    def _tell_end(self, slot: Slot, detail: dict[str, int | str]) -> None:
        told: dict[str, Any] = {**detail, "step": slot.step, "state": slot.state.value}
        if slot.killed_because:
            told["why"] = slot.killed_because
        elif detail.get("name") == "SIGKILL":
            told["out_of_memory"] = self._shortage.explains_kill()
        self._teller.tell(
            SignalKind.WORKER_EXITED,
            slot.attempt,
            slot.rank,
            slot.name,
            pid=slot.child.pid,
            detail=told,
        )

    def _fork(self, expected: dict[str, Any] | None = None) -> str:
        """`expected`: the only place that it may be given, {mesh, rank}."""
        with self._changed:
            self._forked += 1
            name = f"{self._config.agent}.{self._incarnation}.{self._forked}"
        path = self._beacon_of(name)
        request: dict[str, Any] = {"env": self._device_environment(), "beacon": str(path)}
        if expected is not None:
            request["expected"] = expected
        try:
            beacon.create(path)
            if expected is None:
                child = self._brood.fork("worker", name, request)
            else:
                child = self._templates.fork(name, request)
        except BaseException:  # there is no worker whose end would remove it
            path.unlink(missing_ok=True)
            raise
        with self._changed:
            self._slots[name] = Slot(child, expected=expected["rank"] if expected else None)
        assert self._io is not None
        self._io.watch(child)
        if self._closing:  # `stop` did not know of it
            child.kill()
        return name

    def _beacon_of(self, name: str) -> Path:
        return beacon.path_of(Path(self._config.memory_root), name)

    def _may_wait(self, slot: Slot, order: FormOrder) -> bool:
        """Whether it is a spare one for a rank that is here, on the mesh that it has built for."""
        waits = slot.state is WorkerState.WARM and slot.expected is not None
        on_it = waits and slot.child.request["expected"]["mesh"] == order.mesh
        return on_it and slot.expected in {seat.rank for seat in order.seats}

    def _refuse_stale(self, order: FormOrder) -> None:
        if order.attempt < self._fenced:
            raise StaleCommand(f"attempt {order.attempt} is older than {self._fenced}")

    def _kill_stragglers(self, slots: dict[str, Slot], attempt: int) -> None:
        """Kill those that do not leave: at once if they sleep, at the end of the grace if not.

        A worker that computes gets its grace. One that sleeps on, although every connection of
        its groups is cut, waits for a wake-up that will never come: gloo forgets a send whose
        receiver never showed up when the connection ends, and waits for its time-out.
        """
        deadline = time.monotonic() + self._config.abort_grace_s
        asleep = dict.fromkeys(slots, 0)
        while time.monotonic() < deadline:
            for name in self._unparked(slots, attempt):
                asleep[name] = asleep[name] + 1 if _sleeps(slots[name]) else 0
                if asleep[name] * LOOK_S >= self._config.asleep_limit_s:
                    self._kill_straggler(slots[name], "slept on after its connections were cut")
            if self._wait_parked(slots, attempt, LOOK_S):
                return
        for name in self._unparked(slots, attempt):
            self._kill_straggler(slots[name], f"did not leave in {self._config.abort_grace_s} s")

    def _kill_straggler(self, slot: Slot, why: str) -> None:
        slot.killed_because = why
        slot.child.kill()

    def _unparked(self, slots: dict[str, Slot], attempt: int) -> list[str]:
        return [n for n, s in slots.items() if n in self._slots and s.parked_for < attempt]

    def _wait_parked(self, slots: dict[str, Slot], attempt: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unparked(slots, attempt), timeout_s)

    def _device_environment(self) -> dict[str, str]:
        """One device of the node's for the new worker, unless it has none."""
        if not self._config.gpus_per_worker:
            return {}
        with self._changed:
            taken = {
                slot.child.request["env"].get("CUDA_VISIBLE_DEVICES")
                for slot in self._slots.values()
            }
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        free = [device for device in visible if device not in taken]
        return {"CUDA_VISIBLE_DEVICES": free[0] if free else visible[0]}


def _sleeps(slot: Slot) -> bool:
    """Its control thread does not count: that goes on cutting connections."""
    return linux_processes.sleeps(slot.child.pid, but=control_channel.THREAD)


def _picked(message: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: message[name] for name in names}
