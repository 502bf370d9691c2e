"""Brings the state that a rank is to restore into its own segment on this node.

From a partner's memory, from the replica that lies here, from the ranks of another mesh, or not at
all where it is there already.
A fence ends every delivery for an older attempt before it returns: nothing is written to a
segment that the next attempt's worker may be writing by then.
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
from holdfast_workers.memory.reshard import Reshard
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Place, Restore, Tier

STOP_S = 5.0


class DeliveryStuck(WorkersError):
    """A delivery for a fenced attempt goes on writing: no fence is proven."""


class Courier:
    """Thread-safe."""

    def __init__(self, agent: str, secret: bytes, timeout_s: float) -> None:
        self._agent = agent
        self._secret = secret
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._fenced = 0
        self._writing: dict[int, tuple[int, tuple[socket.socket, ...]]] = {}

    def bring(
        self,
        attempt: int,
        rank: int,
        source: Restore,
        store: SegmentStore,
        left: Mapping[str, bytes],
    ) -> None:
        """Bring it into `store`. `left`: what the rank itself gives where no other rank can.

        Raises a WorkersError if the state is not to be had, or not for this attempt any more."""
        if source.tier is Tier.RESHARD:
            with self._delivery() as number:
                self._begin(number, attempt, None)  # it may write before it has any connection
                Reshard(
                    self._secret,
                    self._agent,
                    source,
                    rank,
                    store,
                    on_connected=lambda sock: self._begin(number, attempt, sock),
                ).run(left, self._timeout_s)
        elif source.agent != self._agent:
            with self._delivery() as number:
                fetch(
                    self._secret,
                    source,
                    rank,
                    store,
                    self._timeout_s,
                    on_connected=lambda sock: self._begin(number, attempt, sock),
                )
        elif source.place is Place.REPLICA:
            with self._delivery() as number:
                self._begin(number, attempt, None)
                store.adopt(rank)

    def fence(self, attempt: int) -> None:
        """Return once no delivery for an older attempt writes any more. Raises DeliveryStuck."""

        def older() -> list[tuple[socket.socket, ...]]:
            return [socks for number, socks in self._writing.values() if number < attempt]

        with self._changed:
            self._fenced = max(self._fenced, attempt)
            for sock in itertools.chain(*older()):
                wire.shut(sock)
            if not self._changed.wait_for(lambda: not older(), STOP_S):
                raise DeliveryStuck(f"{len(older())} did not end within {STOP_S} s")

    @contextmanager
    def _delivery(self) -> Iterator[int]:
        number = next(self._numbers)
        try:
            yield number
        finally:
            with self._changed:
                self._writing.pop(number, None)
                self._changed.notify_all()

    def _begin(self, number: int, attempt: int, sock: socket.socket | None) -> None:
        with self._changed:
            if attempt < self._fenced:
                raise StaleCommand(f"attempt {attempt} has ended, {self._fenced} is on")
            _, open_ = self._writing.get(number, (attempt, ()))
            self._writing[number] = (attempt, open_ if sock is None else (*open_, sock))
