"""A node's memory checkpoints: kept, offered to partners, served to peers, delivered to ranks.

They are named segments in shared memory, which outlive every process; the agent's next incarnation
on the node attaches them again. Nothing is accepted from an attempt below the fence. Thread-safe:
called by the agent's commands, its I/O thread, its background tasks and the data channel's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.agent.worker_pool import Slot, WorkerPool
from holdfast_workers.fault_injection.fault_points import FaultPoints
from holdfast_workers.ipc.listening import PortRange
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import BadShard, SourceLost
from holdfast_workers.memory.peer_tls import peer_tls
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore, mesh_tag
from holdfast_workers.memory.state_delivery import StateDelivery, parts_for
from holdfast_workers.program_memory.payload import payload_facts
from holdfast_workers.protocol.lease import Grant
from holdfast_workers.protocol.messages import Held, Partner, Place, Seat, Tier
from holdfast_workers.protocol.processes import PartnerPresence, StateReply, StepReplicated
from holdfast_workers.protocol.signals import DamagedShard, PartnerLost, SourcesLost

RunInBackground = Callable[..., None]
"""Runs a function with its arguments in another thread, without waiting for it."""


class NodeMemory:
    """`attempt()` is the highest attempt that the agent received; `closing` is set when it ends."""

    def __init__(
        self,
        config: AgentConfig,
        root: Path,
        signals: SignalSender,
        run_in_background: RunInBackground,
        attempt: Callable[[], int],
        closing: threading.Event,
        on_grant: Callable[[Grant], None],
        on_lifeline_end: Callable[[int], None],
    ) -> None:
        self._signals = signals
        self._faults = FaultPoints.from_environment()
        self._run_in_background = run_in_background
        self._attempt = attempt
        self._agent, self._runs_program = config.agent, config.brings_program
        self._closing = closing
        self._worker_pool: WorkerPool | None = None
        self._offering = threading.Lock()
        self._store = SegmentStore(
            root, mesh_tag(config.plan.mesh), on_quarantine=self._bad_shard, facts_of=payload_facts
        )
        self.tls = peer_tls(config.tls_dir)
        self._make_server = partial(
            DataServer,
            self._store,
            config.secret,
            config.host,
            PortRange.parse(config.ports),
            on_grant=on_grant,
            on_lifeline_end=on_lifeline_end,
            heartbeat_s=config.plan.heartbeat_s,
            tls=self.tls,
            cache_dir=Path(config.cache_dir) if config.reads_token_sets else None,
        )
        self._server: DataServer | None = None
        self._replicator = Replicator(
            self._store,
            config.secret,
            on_replicated=self._replicated,
            on_lost=self._partner_lost,
            tls=self.tls,
        )
        limit_s = config.plan.form_timeout_s
        self._delivery = StateDelivery(config.agent, config.secret, limit_s, self.tls)

    def open(self) -> None:
        """Open the data channel. Raises OSError if the node has no such address."""
        if self._server is None:
            self._server = self._make_server()

    def attach(self, worker_pool: WorkerPool) -> None:
        """Set the pool of the workers whose state this is."""
        self._worker_pool = worker_pool

    @property
    def port(self) -> int:
        """Port of the data channel; 0: it is not open."""
        return self._server.port if self._server is not None else 0

    def held(self) -> tuple[Held, ...]:
        """All commits held, of every mesh."""
        store = self._store
        return tuple(held for mesh in store.meshes() for held in store.for_mesh(mesh).held())

    def find(self, rank: int, place: Place) -> Segment | None:
        return self._store.find(rank, place)

    def own_segment(self, rank: int) -> Path:
        """Path of the segment in which the rank's worker keeps its state."""
        return self._store.path(rank, Place.OWN)

    def refuse(self, attempt: int) -> None:
        """Accept no more state of attempts before `attempt`."""
        if self._server is not None:
            self._server.fence(attempt)

    def fence(self, attempt: int) -> None:
        """Abort transfers for attempts before `attempt`, which their workers have left."""
        self._replicator.fence(attempt)
        self._delivery.fence(attempt)

    def use_mesh(self, mesh: dict[str, int]) -> None:
        """Interpret ranks as ranks of `mesh` from here on."""
        self._store = self._store.for_mesh(mesh_tag(mesh))
        self._replicator.use_store(self._store)

    def set_partners(self, rank: int, partners: tuple[Partner, ...], attempt: int) -> None:
        """Set the partners of a rank; its worker learns of them by its order."""
        self._replicator.set_partners(rank, partners, attempt=attempt)

    def change_partners(self, rank: int, partners: tuple[Partner, ...], attempt: int) -> None:
        """Change the partners of a rank that may be training: its worker is informed, and the new
        partners are offered the newest checkpoint."""
        self.set_partners(rank, partners, attempt)
        slot = self._slot_of(rank)
        if slot is not None:
            _send_has_partner(slot, present=bool(partners))
        if slot is not None and slot.has_joined:
            self.offer(slot, None)

    def offer(self, slot: Slot, computed: int | None) -> None:
        """Offer the newest memory checkpoint of a worker to its partners. `computed`: the attempt
        that computed it; None: the segment names it."""
        assert slot.rank is not None
        if computed is not None:
            self._faults.reach("replicate", slot.step)
        with self._offering:  # otherwise an older checkpoint could be offered after a newer one
            if computed is not None:
                self._replicator.offer(slot.rank, computed, slot.step)
                return
            segment = self._store.find(slot.rank, Place.OWN)
            for commit in segment.commits()[:1] if segment is not None else ():
                self._replicator.offer(slot.rank, commit.attempt, commit.step)

    def on_seated(self, slot: Slot, seat: Seat, attempt: int, world_size: int) -> None:
        """Deliver the state that a worker waits for, if its order restores from memory."""
        if seat.restore.tier is Tier.RESHARD and self._runs_program:
            self._run_in_background(self._bring_parts, slot, attempt, world_size)
        if seat.restore.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
            self._run_in_background(self._bring, slot, attempt, {})

    def fill_from_other_mesh(self, slot: Slot, attempt: int, own: dict[str, bytes]) -> None:
        """Fill the segment that a worker made: only the worker knows the layout on its mesh."""
        self._run_in_background(self._bring, slot, attempt, own)

    def free_all_but(
        self, mesh: dict[str, int], own: frozenset[int], replicas: frozenset[int]
    ) -> None:
        """Free everything except the checkpoints of these ranks of `mesh`."""
        store = self._store.for_mesh(mesh_tag(mesh))
        store.keep_only(own, replicas)
        store.free_others()

    def free_other_meshes(self) -> None:
        self._run_in_background(self._store.free_others)

    def close(self) -> None:
        """Close the data channel: its server and the links to partners."""
        self._replicator.close()
        if self._server is not None:
            self._server.close()

    def free_all(self) -> None:
        self._store.free_all()

    def _bring(self, slot: Slot, attempt: int, own: dict[str, bytes]) -> None:
        """Deliver the rank's state into its own segment, and send the result to the worker."""
        assert slot.rank is not None
        assert slot.restore is not None
        answer = StateReply(attempt)
        try:
            self._delivery.deliver(attempt, slot.rank, slot.restore, self._store, own)
        except Exception as error:  # the worker reports it as a failed restore
            # Of several sources it is unknown which was bad: none is reported as damaged.
            damaged = isinstance(error, BadShard) and slot.restore.tier is not Tier.RESHARD
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, SourceLost) and error.origins:
                lost = tuple((lost.agent, lost.place, lost.rank) for lost in error.origins)
                self._signals.send(SourcesLost(lost, message), attempt, slot.rank)
            answer = StateReply(attempt, message, damaged)
        slot.child.send(answer)

    def _bring_parts(self, slot: Slot, attempt: int, world_size: int) -> None:
        """Deliver whole payloads of another world, of which each rank of this one gets its share:
        only the program can divide them. The program reads them where they are."""
        assert slot.rank is not None
        assert slot.restore is not None
        answer = StateReply(attempt)
        try:
            for rank, source in parts_for(slot.rank, world_size, slot.restore, self._agent).items():
                store = self._store.for_mesh(slot.restore.mesh)
                self._delivery.deliver(attempt, rank, source, store, {})
        except Exception as error:  # the program's rank reports it as a failed restore
            answer = StateReply(attempt, f"{type(error).__name__}: {error}")
        slot.child.send(answer)

    def _replicated(self, rank: int, commit: Commit) -> None:
        slot = self._slot_of(rank)
        if slot is not None:  # the worker's attempt, not that which computed the step
            slot.child.send(StepReplicated(slot.attempt, commit.step, commit.digest))

    def _partner_lost(self, rank: int, partner: Partner, why: str, others: bool) -> None:
        slot = self._slot_of(rank)
        if slot is None or self._closing.is_set():
            return
        if not others:
            _send_has_partner(slot, present=False)  # training must never wait for a lost partner
        self._signals.send(PartnerLost(partner.agent, why), slot.attempt, rank, slot.name)

    def _bad_shard(self, bad: Quarantined) -> None:
        message = f"{bad.path.name}: {bad.reason}"
        damaged = DamagedShard(bad.place, bad.step, bad.attempt, message)
        self._signals.send(damaged, self._attempt(), bad.rank)

    def _slot_of(self, rank: int) -> Slot | None:
        assert self._worker_pool is not None
        return self._worker_pool.with_rank(rank)


def _send_has_partner(slot: Slot, *, present: bool) -> None:
    slot.child.send(PartnerPresence(slot.attempt, present))
