"""A node's memory checkpoints: kept, offered to partners, served to others, brought to ranks.

They are named segments in shared memory, which outlive every process; the agent's next life on the
node attaches them again. Nothing is taken from an attempt below the fence. Thread-safe: called by
the agent's commands, its I/O thread and its errands, and by the threads of the data channel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.agent.worker_pool import Crew, Slot
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import BadShard, SourceLost
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore, mesh_tag
from holdfast_workers.memory.state_delivery import Courier
from holdfast_workers.protocol.lease import Grant
from holdfast_workers.protocol.messages import Held, Partner, Place, Seat, SignalKind, Tier

Errand = Callable[..., None]
"""Runs a function with its arguments elsewhere, so that nobody waits for it."""


class NodeMemory:
    """`attempt()` is the highest that the agent was told of; `closing` is set when it ends."""

    def __init__(
        self,
        config: AgentConfig,
        root: Path,
        teller: Teller,
        errand: Errand,
        attempt: Callable[[], int],
        closing: threading.Event,
        on_grant: Callable[[Grant], None],
        on_supervisor_end: Callable[[int], None],
    ) -> None:
        self._root = root
        self._teller = teller
        self._faults = FaultPoints.from_environment()
        self._errand = errand
        self._attempt = attempt
        self._closing = closing
        self._crew: Crew | None = None
        self._offering = threading.Lock()
        self._store = SegmentStore(root, mesh_tag(config.mesh), on_bad=self._bad_shard)
        self._server = DataServer(
            self._store,
            config.secret,
            config.host,
            on_grant=on_grant,
            on_supervisor_end=on_supervisor_end,
            heartbeat_s=config.heartbeat_s,
        )
        self._replicator = Replicator(
            self._store, config.secret, on_replicated=self._replicated, on_lost=self._partner_lost
        )
        self._courier = Courier(config.agent, config.secret, config.form_timeout_s)

    def attach(self, crew: Crew) -> None:
        """Name the workers whose state it is."""
        self._crew = crew

    @property
    def port(self) -> int:
        """Of the data channel."""
        return self._server.port

    def held(self) -> tuple[Held, ...]:
        """All that is held, of every mesh."""
        store = self._store
        return tuple(one for mesh in store.meshes() for one in store.of(mesh).held())

    def find(self, rank: int, place: Place) -> Segment | None:
        return self._store.find(rank, place)

    def whereabouts(self, rank: int) -> dict[str, str]:
        """What a worker is told of its own segment."""
        path = self._store.path(rank, Place.OWN)
        return {"segment_root": str(self._root), "segment_path": str(path)}

    def refuse(self, attempt: int) -> None:
        """From here on nothing comes in of an attempt before `attempt`."""
        self._server.fence(attempt)

    def fence(self, attempt: int) -> None:
        """Give up what is under way for attempts before `attempt`: its workers have left them."""
        self._replicator.fence(attempt)
        self._courier.fence(attempt)

    def turn_to(self, mesh: dict[str, int]) -> None:
        """From here on ranks are those of `mesh`."""
        self._store = self._store.of(mesh_tag(mesh))
        self._replicator.turn_to(self._store)

    def set_partners(self, rank: int, partners: tuple[Partner, ...], attempt: int) -> None:
        """Who keeps copies of a rank whose worker is told of it otherwise."""
        self._replicator.set_partners(rank, partners, attempt=attempt)

    def change_partners(self, rank: int, partners: tuple[Partner, ...], attempt: int) -> None:
        """Other partners for a rank that may be training: it is told, they get what there is."""
        self.set_partners(rank, partners, attempt)
        slot = self._slot_of(rank)
        if slot is not None:
            _tell_partnered(slot, present=bool(partners))
        if slot is not None and slot.has_joined:
            self.offer(slot, None)

    def offer(self, slot: Slot, computed: int | None) -> None:
        """Offer the newest memory checkpoint of a worker to its partners: of the attempt
        `computed`, or what its segment says."""
        assert slot.rank is not None
        if computed is not None:
            self._faults.reach("replicate", slot.step)
        with self._offering:  # or one that was the newest when looked for could be offered last
            if computed is not None:
                self._replicator.offer(slot.rank, computed, slot.step)
                return
            segment = self._store.find(slot.rank, Place.OWN)
            for commit in segment.commits()[:1] if segment is not None else ():
                self._replicator.offer(slot.rank, commit.attempt, commit.step)

    def seated(self, slot: Slot, seat: Seat, attempt: int) -> None:
        """A worker has its rank: bring the state from memory that it waits for."""
        if seat.restore.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
            self._errand(self._bring, slot, attempt, {})

    def fill_from_other_mesh(self, slot: Slot, attempt: int, own: dict[str, bytes]) -> None:
        """The worker has made its segment: only it knows how the state lies on its mesh."""
        self._errand(self._bring, slot, attempt, own)

    def free_all_but(
        self, mesh: dict[str, int], own: frozenset[int], replicas: frozenset[int]
    ) -> None:
        """Free what is not of these ranks of `mesh`, and all of other meshes."""
        store = self._store.of(mesh_tag(mesh))
        store.keep_only(own, replicas)
        store.free_others()

    def free_other_meshes(self) -> None:
        self._errand(self._store.free_others)

    def close(self) -> None:
        """End the data channel, on both sides."""
        self._replicator.close()
        self._server.close()

    def free_all(self) -> None:
        self._store.free_all()

    def _bring(self, slot: Slot, attempt: int, own: dict[str, bytes]) -> None:
        """See to it that the rank's state lies in its own segment, and tell the worker."""
        assert slot.rank is not None
        assert slot.restore is not None
        answer: dict[str, Any] = {"op": "state", "attempt": attempt, "ok": True, "message": ""}
        try:
            self._courier.bring(attempt, slot.rank, slot.restore, self._store, own)
        except Exception as error:  # told to the worker, which reports it as a failed restore
            # Of several sources each may have been bad in another way: none is accused.
            damaged = isinstance(error, BadShard) and slot.restore.tier is not Tier.RESHARD
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, SourceLost) and error.origins:
                lost = [[one.agent, one.place.value, one.rank] for one in error.origins]
                detail = {"origins": lost, "message": message}
                self._teller.tell(SignalKind.SOURCES_LOST, attempt, slot.rank, detail=detail)
            answer.update(ok=False, damaged=damaged, message=message)
        slot.child.send(answer)

    def _replicated(self, rank: int, attempt: int, step: int) -> None:
        del attempt  # the attempt that computed the step; the worker is told of its own
        slot = self._slot_of(rank)
        if slot is not None:
            slot.child.send({"op": "replicated", "attempt": slot.attempt, "step": step})

    def _partner_lost(self, rank: int, partner: Partner, why: str, others: bool) -> None:
        slot = self._slot_of(rank)
        if slot is None or self._closing.is_set():
            return
        if not others:
            _tell_partnered(slot, present=False)  # never make training wait for it
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
        self._teller.tell(SignalKind.BAD_SHARD, self._attempt(), bad.rank, detail=detail)

    def _slot_of(self, rank: int) -> Slot | None:
        assert self._crew is not None
        return self._crew.with_rank(rank)


def _tell_partnered(slot: Slot, *, present: bool) -> None:
    slot.child.send({"op": "partner", "attempt": slot.attempt, "present": present})
