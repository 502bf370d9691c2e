"""The workers of one node: who they are, what they do, how they are fenced and seated.

Kept in step by the workers' own messages and exits; turned into signals here. A worker is `warm`
(forked, no rank), `joining`, `training`, `parked` (left its attempt), or `done`. Its slot goes
when its process does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdfast_workers import processes
from holdfast_workers.agent_config import AgentConfig
from holdfast_workers.children import Brood, Child
from holdfast_workers.errors import StaleCommand, WorkersError
from holdfast_workers.journal import Journal
from holdfast_workers.messages import (
    FormOrder,
    Seat,
    SignalKind,
    StepRow,
    WorkerError,
    WorkerReport,
    WorkerState,
)
from holdfast_workers.node_io import NodeIO
from holdfast_workers.signalling import Teller

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
    error: WorkerError | None = None
    killed_because: str = ""
    """Why its own agent killed it, if it did."""

    @property
    def name(self) -> str:
        return self.child.name


class Crew:
    """`on_standing(slot)`: a worker's newest state in memory is that of `slot.step`, computed by
    attempt `computed` (None: by whichever attempt the segment says). `on_save(message)`: a copy
    for the remote tier lies ready."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        brood: Brood,
        teller: Teller,
        journal: Journal,
        on_standing: Callable[[Slot, int | None], None],
        on_save: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._brood = brood
        self._teller = teller
        self._journal = journal
        self._on_standing = on_standing
        self._hand_to_saver = on_save
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

    # --- orders ---------------------------------------------------------------------------------

    def fork(self) -> str:
        """Fork one worker; its name. Raises ZygoteFailed."""
        with self._forking:
            return self._fork()

    def fill(self) -> None:
        """Fork workers until the node has as many as it can run. May be called by several."""
        while True:
            with self._forking:
                if self._closing or len(self._slots) >= self._config.capacity:
                    return
                self._fork()

    def fence(self, attempt: int) -> None:
        """Return once every worker has left all attempts before `attempt`, parked or dead.

        Those that have a seat in `attempt` already are left alone, however late this comes; and
        from here on nobody gets a seat in an older one. Raises StillThere.
        """
        with self._changed:
            self._fenced = max(self._fenced, attempt)
            slots = {name: slot for name, slot in self._slots.items() if slot.attempt < attempt}
        for slot in slots.values():
            if self._config.reform == "fork" and slot.state is not WorkerState.WARM:
                slot.child.kill()
            else:
                slot.child.send({"op": "fence", "attempt": attempt})
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
        name = seat.worker if seat.worker is not None else self.fork()
        with self._changed:
            self._refuse_stale(order)
            slot = self._slots.get(name)
            if slot is not None:
                slot.state, slot.attempt, slot.rank = WorkerState.JOINING, order.attempt, seat.rank
                slot.error = None
        if slot is None:  # died between the fence's answer and this order
            detail = {"why": "the worker was gone before it could take its rank"}
            self._teller.tell(
                SignalKind.WORKER_EXITED, order.attempt, seat.rank, name, detail=detail
            )
            return None
        slot.child.send({"op": "join", "attempt": order.attempt, "rank": seat.rank, **join})
        return slot

    def dismiss_unseated(self, order: FormOrder) -> None:
        """End the workers that the order does not name: they are not needed any more."""
        seated = {seat.worker for seat in order.seats}
        with self._changed:
            self._refuse_stale(order)
            spare = [name for name in self._slots if name not in seated]
            children = [self._slots.pop(name).child for name in spare]
        for child in children:
            child.kill()

    def stop(self, wait_s: float = 0.0) -> None:
        """End every worker, and wait a little for them to be gone; their exits are no news."""
        with self._changed:
            self._closing = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.child.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._slots, wait_s)

    # --- looking --------------------------------------------------------------------------------

    def reports(self) -> tuple[WorkerReport, ...]:
        with self._changed:
            return tuple(
                WorkerReport(n, s.child.pid, s.state, s.attempt, s.rank, s.step, s.error)
                for n, s in self._slots.items()
            )

    def with_rank(self, rank: int) -> Slot | None:
        """The worker that holds `rank` in the newest attempt it has a part in."""
        with self._changed:
            holders = [slot for slot in self._slots.values() if slot.rank == rank]
        return max(holders, key=lambda slot: slot.attempt, default=None)

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
        """A worker's process is gone."""
        with self._changed:
            slot = self._slots.pop(child.name, None)
            self._changed.notify_all()
        if slot is None or self._closing:
            return
        self._teller.tell(
            SignalKind.WORKER_EXITED,
            slot.attempt,
            slot.rank,
            child.name,
            pid=child.pid,
            detail={
                **detail,
                "step": slot.step,
                "state": slot.state.value,
                **({"why": slot.killed_because} if slot.killed_because else {}),
            },
        )

    def _on_hello(self, slot: Slot, message: dict[str, Any]) -> None:
        """Nothing to do: a slot is warm from its fork on."""

    def _on_joined(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.state, slot.step = WorkerState.TRAINING, message["step"]
        self._on_standing(slot, None)
        detail = {key: message[key] for key in ("step", "tier", "phases_s")}
        self._tell(SignalKind.WORKER_JOINED, slot, message, detail)

    def _on_committed(self, slot: Slot, message: dict[str, Any]) -> None:
        with self._changed:
            slot.step = message["step"]
        self._on_standing(slot, message["attempt"])

    def _on_row(self, slot: Slot, message: dict[str, Any]) -> None:
        row = StepRow(**message["row"])
        with self._changed:
            slot.step = row.step
        if self._journal.add_row(row):
            detail = {"step": row.step, "at": row.at}
            self._tell(SignalKind.FIRST_STEP, slot, message, detail)

    def _on_digest(self, slot: Slot, message: dict[str, Any]) -> None:
        self._journal.add_digest(message["step"], message["digest"])

    def _on_save(self, slot: Slot, message: dict[str, Any]) -> None:
        self._hand_to_saver(message)

    def _on_failed(self, slot: Slot, message: dict[str, Any]) -> None:
        fields = {k: message[k] for k in ("kind", "type", "message", "traceback", "step")}
        with self._changed:
            slot.error = WorkerError(**fields)
        detail = {"error": fields, "step": message["step"]}
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
        self._teller.tell(
            kind,
            message["attempt"],
            message["rank"],
            slot.name,
            pid=slot.child.pid,
            detail=detail,
        )

    def _fork(self) -> str:
        with self._changed:
            self._forked += 1
            name = f"{self._config.agent}.{self._incarnation}.{self._forked}"
        child = self._brood.fork("worker", name, {"env": self._device_environment()})
        with self._changed:
            self._slots[name] = Slot(child)
        assert self._io is not None
        self._io.watch(child)
        if self._closing:  # `stop` did not know of it
            child.kill()
        return name

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
                asleep[name] = asleep[name] + 1 if processes.sleeps(slots[name].child.pid) else 0
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


def join_fields(order: FormOrder, seat: Seat, config: AgentConfig) -> dict[str, Any]:
    """What a worker is told of its seat, beside where its segments lie."""
    return {
        "world_size": order.world_size,
        "mesh": order.mesh,
        "store_host": order.store_host,
        "store_port": order.store_port,
        "restore": asdict(seat.restore),
        "has_partner": seat.partner is not None,
        "reporter": seat.rank == min(each.rank for each in order.seats),
        "timeout_s": config.form_timeout_s,
        "device": "cuda:0" if config.gpus_per_worker else "cpu",
    }
