"""Delivers the state that a rank must restore into the rank's own segment on this node.

Sources: a partner's memory, the replica on this node, or the ranks of another mesh. If the state is
already present, nothing moves. A fence ends every delivery for an older attempt before it returns,
so no delivery writes to a segment that the next attempt's worker may already be writing.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from holdfast_workers.errors import StaleCommand, WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.fetch import fetch
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.reshard import Reshard
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Origin, Place, Restore, Tier

STOP_S = 5.0


class DeliveryStuck(WorkersError):
    """A delivery for a fenced attempt did not stop in time, so the fence is not proven."""


def parts_for(rank: int, world_size: int, source: Restore, agent: str) -> dict[int, Restore]:
    """The ranks of another world whose whole state the new `rank` gets, and the source of each;
    without those that `agent`, its own, holds already. Each rank of the new world gets at least
    one."""
    by_rank: dict[int, list[Origin]] = {}
    for origin in source.origins:
        by_rank.setdefault(origin.rank, []).append(origin)
    former = sorted(by_rank)
    wanted = {old for old in former if old % world_size == rank} or {former[rank % len(former)]}
    return {
        old: _whole(source, by_rank[old][0])
        for old in sorted(wanted)
        if not any(origin.agent == agent for origin in by_rank[old])
    }


def _whole(source: Restore, origin: Origin) -> Restore:
    return Restore(
        Tier.PARTNER_RAM,
        source.step,
        attempt=source.attempt,
        digest=origin.digest,
        agent=origin.agent,
        place=origin.place,
        host=origin.host,
        data_port=origin.data_port,
    )


class StateDelivery:
    """Runs and fences deliveries. Thread-safe."""

    def __init__(
        self, agent: str, secret: bytes, timeout_s: float, tls: PeerTls | None = None
    ) -> None:
        self._agent = agent
        self._secret = secret
        self._tls = tls
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._fenced = 0
        self._running: dict[int, tuple[int, tuple[socket.socket, ...]]] = {}

    def deliver(
        self,
        attempt: int,
        rank: int,
        source: Restore,
        store: SegmentStore,
        from_rank: Mapping[str, bytes],
    ) -> None:
        """Deliver the state that `source` names into `store`.

        `from_rank`: the entries, by name, that the rank itself provides because no other rank holds
        them. Raises a WorkersError if no source can deliver, StaleCommand if `attempt` is
        fenced."""
        if source.tier is Tier.RESHARD:
            with self._tracked() as number:
                # A reshard may write before its first connection.
                self._register(number, attempt, None)
                Reshard(
                    self._secret,
                    self._agent,
                    source,
                    rank,
                    store,
                    on_connected=lambda sock: self._register(number, attempt, sock),
                    tls=self._tls,
                ).run(from_rank, self._timeout_s)
        elif source.agent != self._agent:
            with self._tracked() as number:
                fetch(
                    self._secret,
                    source,
                    rank,
                    store,
                    self._timeout_s,
                    on_connected=lambda sock: self._register(number, attempt, sock),
                    tls=self._tls,
                )
        elif source.place is Place.REPLICA:
            with self._tracked() as number:
                self._register(number, attempt, None)
                store.adopt(rank)

    def fence(self, attempt: int) -> None:
        """Stop the deliveries of attempts below `attempt`; returns once none of them writes. Raises
        DeliveryStuck."""

        def older() -> list[tuple[socket.socket, ...]]:
            return [socks for number, socks in self._running.values() if number < attempt]

        with self._changed:
            self._fenced = max(self._fenced, attempt)
            for sock in itertools.chain(*older()):
                wire.shut(sock)
            if not self._changed.wait_for(lambda: not older(), STOP_S):
                raise DeliveryStuck(f"{len(older())} deliveries did not stop within {STOP_S} s")

    @contextmanager
    def _tracked(self) -> Iterator[int]:
        number = next(self._numbers)
        try:
            yield number
        finally:
            with self._changed:
                self._running.pop(number, None)
                self._changed.notify_all()

    def _register(self, number: int, attempt: int, sock: socket.socket | None) -> None:
        with self._changed:
            if attempt < self._fenced:
                raise StaleCommand(f"attempt {attempt} has ended, {self._fenced} is on")
            _, socks = self._running.get(number, (attempt, ()))
            self._running[number] = (attempt, socks if sock is None else (*socks, sock))
