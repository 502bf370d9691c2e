"""Pushing commits to the partners' node agents.

The replicator sends what is newest when it comes to it. It never holds up a worker: offers are
noted and coalesced, one thread per partner sends, and a commit that the worker overwrote in the
meantime is given up for the newer one. A partner that fails is reported once, and tried again
while there is something to send.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_workers.errors import WorkersError
from holdfast_workers.layout import StateLayout
from holdfast_workers.memory import wire
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.store import SegmentStore
from holdfast_workers.memory.wire import (
    DEFAULT_TIMEOUTS,
    Code,
    Refused,
    Role,
    Timeouts,
    WireError,
)
from holdfast_workers.messages import Partner, Place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offer:
    attempt: int
    step: int


class Replicator:
    """Keeps every rank's newest commit at its partner.

    `on_replicated(rank, attempt, step)` and `on_lost(rank, partner, why)` are called in a
    partner's thread; `on_lost` once per outage. Neither is called for a partner that the rank no
    longer has. A push that the partner refuses as fenced is dropped in silence: a newer attempt
    is being formed, and its orders are on the way here too.
    """

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        on_replicated: Callable[[int, int, int], None],
        on_lost: Callable[[int, Partner, str], None],
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retry_s: float = 1.0,
    ) -> None:
        self._store = store
        self._secret = secret
        self._tell_replicated = on_replicated
        self._tell_lost = on_lost
        self._timeouts = timeouts
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._links: dict[Partner, _Link] = {}
        self._link_of: dict[int, _Link] = {}
        self._credentials: dict[int, int] = {}
        self._fenced = 0

    def set_partner(self, rank: int, partner: Partner | None, *, attempt: int = 0) -> None:
        """Send commits of `rank` to `partner` from now on, or to nobody.

        `attempt` is the current one. It is what the partner's fence looks at, so that a state
        which an older attempt computed and this one was restored from can be replicated anew.
        One older than the fence changes nothing.
        """
        with self._lock:
            if attempt < self._fenced:
                return
            self._link_of.pop(rank, None)
            self._credentials[rank] = attempt
            if partner is not None:
                link = self._links.get(partner)
                if link is None:
                    link = self._links[partner] = _Link(self, partner)
                self._link_of[rank] = link
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def fence(self, attempt: int) -> None:
        """From its return on no rank has a partner that an attempt below `attempt` gave it."""
        with self._lock:
            self._fenced = max(self._fenced, attempt)
            for rank in [r for r in self._link_of if self._credentials[r] < attempt]:
                del self._link_of[rank]
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def offer(self, rank: int, attempt: int, step: int) -> None:
        """A worker committed `step`. Returns at once; of several, the last offered is sent."""
        with self._lock:
            link = self._link_of.get(rank)
        if link is not None:
            link.offer(rank, _Offer(attempt, step))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop every thread, within `timeout_s`; what was not sent stays unsent."""
        with self._lock:
            links = tuple(self._links.values())
            self._links.clear()
            self._link_of.clear()
        for link in links:
            link.stop()
        deadline = time.monotonic() + timeout_s
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))

    def _take_idle(self) -> list[_Link]:
        """Links that no rank uses any more, taken out; under the lock."""
        idle = [link for link in self._links.values() if link not in self._link_of.values()]
        for link in idle:
            del self._links[link.partner]
        return idle

    # --- what links ask of it -------------------------------------------------------------------

    @property
    def store(self) -> SegmentStore:
        return self._store

    @property
    def timeouts(self) -> Timeouts:
        return self._timeouts

    @property
    def retry_s(self) -> float:
        return self._retry_s

    def dial(self, partner: Partner) -> socket.socket:
        return wire.connect(
            self._secret, partner.host, partner.data_port, Role.PUSH, self._timeouts
        )

    def credential(self, rank: int, commit: Commit) -> int:
        with self._lock:
            return max(self._credentials.get(rank, 0), commit.attempt)

    def replicated(self, link: _Link, rank: int, commit: Commit) -> None:
        if self._is_of(link, rank):
            self._tell_replicated(rank, commit.attempt, commit.step)

    def lost(self, link: _Link, rank: int, why: str) -> None:
        if self._is_of(link, rank):
            self._tell_lost(rank, link.partner, why)

    def _is_of(self, link: _Link, rank: int) -> bool:
        with self._lock:
            return self._link_of.get(rank) is link


class _Link:
    """One partner: a connection that stays, and the thread that sends on it."""

    def __init__(self, owner: Replicator, partner: Partner) -> None:
        self.partner = partner
        self._owner = owner
        self._changed = threading.Condition()
        self._pending: dict[int, _Offer] = {}
        self._stopped = False
        self._sock: socket.socket | None = None
        self._announced: dict[int, StateLayout] = {}
        self._reported: set[int] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"replicate-{partner.agent}", daemon=True
        )
        self._thread.start()

    def offer(self, rank: int, offer: _Offer) -> None:
        with self._changed:
            self._pending[rank] = offer
            self._changed.notify()

    def stop(self) -> None:
        """Make the thread end soon, in mid-push too."""
        with self._changed:
            self._stopped = True
            self._pending.clear()
            self._changed.notify()
            if self._sock is not None:
                wire.shut(self._sock)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            rank, offer = taken
            try:
                self._replicate(rank, offer)
                self._reported.discard(rank)
            except (OSError, WorkersError) as error:
                self._failed(rank, offer, error)
        self._hang_up()

    def _next(self) -> tuple[int, _Offer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopped)
            if self._stopped:
                return None
            rank = next(iter(self._pending))
            return rank, self._pending.pop(rank)

    def _failed(self, rank: int, offer: _Offer, error: Exception) -> None:
        self._hang_up()
        if self._stopped:
            return
        if rank not in self._reported:
            self._reported.add(rank)
            self._owner.lost(self, rank, f"{type(error).__name__}: {error}")
        with self._changed:
            self._pending.setdefault(rank, offer)
            self._changed.wait_for(lambda: self._stopped, self._owner.retry_s)

    def _replicate(self, rank: int, offer: _Offer) -> None:
        segment = self._owner.store.find(rank, Place.OWN)
        if segment is None:
            return  # dropped or adopted away since the offer
        commit = segment.find(offer.attempt, offer.step)
        if commit is None:  # overwritten since: then there is a newer one
            commit = next(iter(segment.commits()), None)
        if commit is None:
            return
        # A worker that steps faster than the link carries would overtake every push.
        segment.pin(commit, self._owner.timeouts.stall_s)
        try:
            self._push(rank, segment, commit)
        except Refused as refusal:
            self._refused(rank, segment, commit, refusal)
        finally:
            segment.unpin()

    def _push(self, rank: int, segment: Segment, commit: Commit) -> None:
        credential = self._owner.credential(rank, commit)
        sock = self._connection()
        if self._announced.get(rank) != segment.layout:
            self._announce(sock, rank, segment.layout, credential)
        try:
            self._send(sock, rank, segment, commit, credential)
        except Refused as refusal:
            if refusal.code != Code.NO_LAYOUT:
                raise
            self._announce(sock, rank, segment.layout, credential)
            self._send(sock, rank, segment, commit, credential)
        self._owner.replicated(self, rank, commit)

    def _announce(
        self, sock: socket.socket, rank: int, layout: StateLayout, credential: int
    ) -> None:
        raw = layout.to_json()
        mesh = self._owner.store.mesh
        wire.send_header(
            sock,
            {
                "op": "layout",
                "rank": rank,
                "mesh": mesh,
                "nbytes": len(raw),
                "credential": credential,
            },
        )
        wire.send_payload(sock, raw)
        wire.receive_header(sock)
        self._announced[rank] = layout

    def _send(
        self, sock: socket.socket, rank: int, segment: Segment, commit: Commit, credential: int
    ) -> None:
        header = {
            "op": "push",
            "rank": rank,
            "attempt": commit.attempt,
            "step": commit.step,
            "nbytes": commit.nbytes,
            "digest": commit.digest,
            "credential": credential,
        }
        wire.send_header(sock, header)
        if not wire.receive_header(sock).get("go"):
            return  # the partner holds it already
        # From here on the payload is owed: were it overtaken, the digest would tell.
        with segment.slot(commit) as payload:
            wire.send_payload(sock, payload)
        wire.receive_header(sock)

    def _refused(self, rank: int, segment: Segment, commit: Commit, refusal: Refused) -> None:
        if refusal.code == Code.FENCED:
            _log.info("rank %d, step %d not replicated: %s", rank, commit.step, refusal)
            return
        if refusal.code == Code.BAD_DIGEST:
            if not segment.is_current(commit):
                return  # overtaken while it was sent; the newer one has been offered
            if not self._owner.store.check(rank, Place.OWN, commit):
                return  # bad in our own memory: quarantined and reported by the store
        raise refusal

    def _connection(self) -> socket.socket:
        if self._sock is not None and wire.is_stale(self._sock):
            self._hang_up()
        if self._sock is None:
            sock = self._owner.dial(self.partner)
            with self._changed:
                self._sock = sock
                if self._stopped:
                    raise WireError("stopped")
        return self._sock

    def _hang_up(self) -> None:
        with self._changed:
            if self._sock is not None:
                self._sock.close()
            self._sock = None
        self._announced.clear()
