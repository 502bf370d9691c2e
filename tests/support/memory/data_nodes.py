"""Memory tiers of several nodes with their data channels, in the test's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.memory.shm import MESH, SECRET, layout_of
from tests.support.waiting import DEADLINE_S

from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import Quarantined, SegmentStore
from holdfast_workers.memory.wire import Timeouts
from holdfast_workers.protocol.messages import Partner, Place, Restore, Tier

NBYTES = 200_000
QUICK = Timeouts(connect_s=1.0, handshake_s=1.0, stall_s=1.0, idle_s=600.0)
PATIENT = Timeouts(DEADLINE_S, DEADLINE_S, DEADLINE_S, idle_s=600.0)


@dataclass
class Node:
    """The memory tier of one node agent, in this process."""

    name: str
    store: SegmentStore
    server: DataServer
    replicator: Replicator
    replicated: list[tuple[int, int, int]] = field(default_factory=list)
    received: list[tuple[int, int, int]] = field(default_factory=list)
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    others: list[bool] = field(default_factory=list)
    bad: list[Quarantined] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        root: Path,
        name: str,
        mesh: str = MESH,
        tls: PeerTls | None = None,
        timeouts: Timeouts = PATIENT,
    ) -> Node:
        node: Node
        bad: list[Quarantined] = []
        store = SegmentStore(root / name, mesh, on_quarantine=bad.append)
        server = DataServer(
            store,
            SECRET,
            "127.0.0.1",
            on_replica=lambda *commit: node.received.append(commit),
            timeouts=timeouts,
            tls=tls,
        )

        def record_loss(rank: int, partner: Partner, reason: str, others: bool) -> None:
            node.others.append(others)
            node.lost.append((rank, partner.agent, reason))

        replicator = Replicator(
            store,
            SECRET,
            lambda rank, commit: node.replicated.append((rank, commit.attempt, commit.step)),
            record_loss,
            timeouts=timeouts,
            retry_s=0.05,
            tls=tls,
        )
        node = cls(name, store, server, replicator, bad=bad)
        return node

    @property
    def partner(self) -> Partner:
        return Partner(self.name, "127.0.0.1", self.server.port)

    def worker(self, rank: int, nbytes: int = NBYTES) -> Segment:
        return self.store.ensure(rank, Place.OWN, layout_of(nbytes))

    def holds(self, place: Place) -> list[tuple[int, int, int]]:
        held = self.store.held(verified=True)
        return [(entry.rank, entry.attempt, entry.step) for entry in held if entry.place is place]

    def close(self) -> None:
        self.replicator.close()
        self.server.close()


def source_at(
    port: int, step: int, place: Place = Place.OWN, digest: str = "", attempt: int = 1
) -> Restore:
    return Restore(
        Tier.PARTNER_RAM,
        step,
        attempt=attempt,
        digest=digest,
        agent="source",
        place=place,
        host="127.0.0.1",
        data_port=port,
    )
