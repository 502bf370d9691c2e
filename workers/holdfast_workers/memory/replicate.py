"""Pushing commits to the partners' node agents.

The replicator sends what is newest when it comes to it. It never holds up a worker: offers are
noted and coalesced, one thread per partner agent sends, and a commit that the worker overwrote in
the meantime is given up for the newer one. A partner that fails is reported once, and tried again
while there is something to send. A rank may have several partners; a step counts as replicated
when all of them hold it, those aside that have failed.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import (
    DEFAULT_TIMEOUTS,
    Code,
    Refused,
    Role,
    Timeouts,
    WireError,
)
from holdfast_workers.protocol.messages import Partner, Place
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offer:
    attempt: int
    step: int


@dataclass(frozen=True)
class _Copy:
    """What one partner of a rank is known to hold."""

    newest: Commit | None = None
    failed: bool = False


def _held_by_all(copies: Mapping[_Link, _Copy]) -> Commit | None:
    """The newest commit that every partner holds which has not failed; None if one holds none."""
    found = [copy.newest for copy in copies.values() if not copy.failed]
    known = [commit for commit in found if commit is not None]
    if not known or len(known) < len(found):
        return None
    return min(known, key=lambda commit: (commit.attempt, commit.step))


class Replicator:
    """Keeps every rank's newest commit at its partners.

    `on_replicated(rank, attempt, step)` and `on_lost(rank, partner, why, others)` are called in a
    partner's thread, one at a time; `on_lost` once per outage, `others`: whether any partner is
    left. Neither is called for a partner that the rank no longer has. A push that the partner
    refuses as fenced is dropped in silence: a newer attempt is being formed, and its orders are
    on the way here too.
    """

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        on_replicated: Callable[[int, int, int], None],
        on_lost: Callable[[int, Partner, str, bool], None],
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
        self._telling = threading.Lock()
        self._links: dict[Partner, _Link] = {}
        self._copies: dict[int, dict[_Link, _Copy]] = {}
        self._senders: dict[int, list[Commit]] = {}
        self._credentials: dict[int, int] = {}
        self._fenced = 0

    def set_partners(self, rank: int, partners: tuple[Partner, ...], *, attempt: int = 0) -> None:
        """Send commits of `rank` to all `partners` from now on; what they hold is asked anew.

        `attempt` is the current one. It is what the partner's fence looks at, so that a state
        which an older attempt computed and this one was restored from can be replicated anew.
        One older than the fence changes nothing. From the return on nothing is told of partners
        that the rank had before.
        """
        with self._telling, self._lock:
            if attempt < self._fenced:
                return
            self._credentials[rank] = attempt
            self._copies[rank] = {self._link(partner): _Copy() for partner in partners}
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def turn_to(self, store: SegmentStore) -> None:
        """Send from `store` from now on. Call between a fence and the partners that follow it."""
        self._store = store

    def fence(self, attempt: int) -> None:
        """From its return on no rank has a partner that an attempt below `attempt` gave it, and
        nothing is told of such a one any more."""
        with self._telling, self._lock:
            self._fenced = max(self._fenced, attempt)
            for rank in [r for r in self._copies if self._credentials[r] < attempt]:
                del self._copies[rank]
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def offer(self, rank: int, attempt: int, step: int) -> None:
        """A worker committed `step`. Returns at once; of several, the last offered is sent."""
        with self._lock:
            links = tuple(self._copies.get(rank, ()))
        for link in links:
            link.offer(rank, _Offer(attempt, step))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop every thread, within `timeout_s`; what was not sent stays unsent."""
        with self._lock:
            links = tuple(self._links.values())
            self._links.clear()
            self._copies.clear()
        for link in links:
            link.stop()
        deadline = time.monotonic() + timeout_s
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))

    def _link(self, partner: Partner) -> _Link:
        """The link to a partner, made if there is none; under the lock."""
        link = self._links.get(partner)
        if link is None:
            link = self._links[partner] = _Link(self, partner)
        return link

    def _take_idle(self) -> list[_Link]:
        """Links that no rank uses any more, taken out; under the lock."""
        used = {link for copies in self._copies.values() for link in copies}
        idle = [link for link in self._links.values() if link not in used]
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
        sock = wire.connect(
            self._secret, partner.host, partner.data_port, Role.PUSH, self._timeouts
        )
        wire.step_back(sock)
        return sock

    @contextmanager
    def pinned(self, rank: int, segment: Segment, commit: Commit) -> Iterator[None]:
        """Keep the commit from being overwritten while it is sent. There is one pin, and several
        links may send: whoever began first has it."""
        with self._lock:
            senders = self._senders.setdefault(rank, [])
            senders.append(commit)
            segment.pin(senders[0], self._timeouts.stall_s)
        try:
            yield
        finally:
            with self._lock:
                senders.remove(commit)
                if senders:
                    segment.pin(senders[0], self._timeouts.stall_s)
                else:
                    segment.unpin()

    def credential(self, rank: int, commit: Commit) -> int:
        with self._lock:
            return max(self._credentials.get(rank, 0), commit.attempt)

    def replicated(self, link: _Link, rank: int, commit: Commit) -> None:
        """The partner holds the commit. Told as soon as all that have not failed hold as much."""
        with self._telling:
            with self._lock:
                copies = self._copies.get(rank, {})
                if link not in copies:
                    return
                before = _held_by_all(copies)
                copies[link] = _Copy(commit)
                held = _held_by_all(copies)
            if held is not None and (held == commit or held != before):
                self._tell_replicated(rank, held.attempt, held.step)

    def lost(self, link: _Link, rank: int, why: str) -> None:
        """The partner failed: nobody waits for it any more."""
        with self._telling:
            with self._lock:
                copies = self._copies.get(rank, {})
                if link not in copies:
                    return
                copies[link] = _Copy(failed=True)
                others = any(not copy.failed for copy in copies.values())
                held = _held_by_all(copies)
            self._tell_lost(rank, link.partner, why, others)
            if held is not None:
                self._tell_replicated(rank, held.attempt, held.step)


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
        with self._owner.pinned(rank, segment, commit):
            try:
                self._push(rank, segment, commit)
            except Refused as refusal:
                self._refused(rank, segment, commit, refusal)

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
                "digest": payload_digest(raw),
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
            "mesh": self._owner.store.mesh,
            "attempt": commit.attempt,
            "step": commit.step,
            "nbytes": commit.nbytes,
            "digest": commit.digest,
            "credential": credential,
        }
        wire.send_header(sock, header)
        answer = wire.receive_header(sock)
        if not answer.get("go"):
            return  # the partner holds it already
        # From here on the payload is owed: were it overtaken, the digest would tell.
        with segment.slot(commit) as payload:
            wire.send_payload(sock, payload[wire.whole(answer, "from") :])
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
