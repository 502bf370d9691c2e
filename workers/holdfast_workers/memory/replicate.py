"""Replication: pushes memory checkpoints to the node agents of the partners.

The replicator never delays a worker: it queues only the newest offer of each rank, and one thread
per partner agent sends. It sends the newest commit at that moment; a commit that the worker has
overwritten is skipped in favour of the newer one. A partner that fails is reported once per outage
and retried while there is something to send. A rank may have several partners; a step counts as
replicated when every partner that has not failed holds it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import (
    DEFAULT_TIMEOUTS,
    RefusalCode,
    Role,
    Timeouts,
    WireError,
    WireRefused,
)
from holdfast_workers.protocol.messages import Partner, Place
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Offer:
    """A commit that a worker has offered for replication."""

    attempt: int
    step: int


@dataclass(frozen=True)
class _PartnerCopy:
    """The newest commit of a rank that one of its partners is known to hold."""

    newest: Commit | None = None
    failed: bool = False


def _held_by_all(copies: Mapping[_Link, _PartnerCopy]) -> Commit | None:
    """The newest commit that every working partner holds; None if one of them holds none."""
    found = [copy.newest for copy in copies.values() if not copy.failed]
    known = [commit for commit in found if commit is not None]
    if not known or len(known) < len(found):
        return None
    return min(known, key=lambda commit: (commit.attempt, commit.step))


class Replicator:
    """Keeps every rank's newest commit at its partners.

    `on_replicated(rank, commit)` and `on_lost(rank, partner, reason, others)` are called in
    a partner's thread, one at a time. `on_lost` is called once per outage; `others` is true if the
    rank has another working partner. Neither is called for a partner that the rank no longer has. A
    push that the partner refuses as fenced is dropped without a report: a newer attempt is being
    formed, and its orders are on the way to this agent too.
    """

    def __init__(
        self,
        store: SegmentStore,
        secret: bytes,
        on_replicated: Callable[[int, Commit], None],
        on_lost: Callable[[int, Partner, str, bool], None],
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retry_s: float = 1.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._store = store
        self._secret = secret
        self._tls = tls
        self._on_replicated = on_replicated
        self._on_lost = on_lost
        self._timeouts = timeouts
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._callback_lock = threading.Lock()
        self._links: dict[Partner, _Link] = {}
        self._partner_copies: dict[int, dict[_Link, _PartnerCopy]] = {}
        self._senders: dict[int, list[Commit]] = {}
        self._credentials: dict[int, int] = {}
        self._fenced = 0

    def set_partners(self, rank: int, partners: tuple[Partner, ...], *, attempt: int = 0) -> None:
        """Send commits of `rank` to all `partners` from now on, and forget what they hold.

        `attempt` is the current one. The partner compares it with its fence, so that a state which
        an older attempt computed, and which this attempt restored, can be replicated again. An
        attempt below the fence changes nothing. After the return no callback names a former partner
        of the rank.
        """
        with self._callback_lock, self._lock:
            if attempt < self._fenced:
                return
            self._credentials[rank] = attempt
            self._partner_copies[rank] = {
                self._link(partner): _PartnerCopy() for partner in partners
            }
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def use_store(self, store: SegmentStore) -> None:
        """Send from `store` from now on. Call it after a fence and before `set_partners`."""
        self._store = store

    def fence(self, attempt: int) -> None:
        """Leave no rank a partner set by an attempt below `attempt`, and no callback that names
        such a partner."""
        with self._callback_lock, self._lock:
            self._fenced = max(self._fenced, attempt)
            for rank in [r for r in self._partner_copies if self._credentials[r] < attempt]:
                del self._partner_copies[rank]
            idle = self._take_idle()
        for link in idle:
            link.stop()

    def offer(self, rank: int, attempt: int, step: int) -> None:
        """Queue `step`, which a worker has committed. Returns at once; a newer offer replaces
        it."""
        with self._lock:
            links = tuple(self._partner_copies.get(rank, ()))
        for link in links:
            link.offer(rank, _Offer(attempt, step))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop every thread, within `timeout_s`. Commits that were not sent stay unsent."""
        with self._lock:
            links = tuple(self._links.values())
            self._links.clear()
            self._partner_copies.clear()
        for link in links:
            link.stop()
        deadline = time.monotonic() + timeout_s
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))

    def _link(self, partner: Partner) -> _Link:
        """The link to a partner, created if needed. The caller holds the lock."""
        link = self._links.get(partner)
        if link is None:
            link = self._links[partner] = _Link(self, partner)
        return link

    def _take_idle(self) -> list[_Link]:
        """Remove and return the links that no rank uses any more. The caller holds the lock."""
        used = {link for copies in self._partner_copies.values() for link in copies}
        idle = [link for link in self._links.values() if link not in used]
        for link in idle:
            del self._links[link.partner]
        return idle

    # --- called by links ------------------------------------------------------------------------

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
        """A new connection to a partner, in the low-priority traffic class."""
        sock = wire.connect(
            self._secret,
            partner.host,
            partner.data_port,
            Role.PUSH,
            self._timeouts,
            tls=self._tls,
        )
        wire.lower_priority(sock)
        return sock

    @contextmanager
    def pinned(self, rank: int, segment: Segment, commit: Commit) -> Iterator[None]:
        """Protect the commit from being overwritten while it is sent. A segment has one pin, and
        several links may send: the link that began first has the pin."""
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
        """The attempt that the partner compares with its fence."""
        with self._lock:
            return max(self._credentials.get(rank, 0), commit.attempt)

    def replicated(self, link: _Link, rank: int, commit: Commit) -> None:
        """Record that the partner holds the commit; report it once all working partners hold it."""
        with self._callback_lock:
            with self._lock:
                copies = self._partner_copies.get(rank, {})
                if link not in copies:
                    return
                before = _held_by_all(copies)
                copies[link] = _PartnerCopy(commit)
                held = _held_by_all(copies)
            if held is not None and (held == commit or held != before):
                self._on_replicated(rank, held)

    def lost(self, link: _Link, rank: int, reason: str) -> None:
        """Record and report that the partner failed: no step waits for it any more."""
        with self._callback_lock:
            with self._lock:
                copies = self._partner_copies.get(rank, {})
                if link not in copies:
                    return
                copies[link] = _PartnerCopy(failed=True)
                others = any(not copy.failed for copy in copies.values())
                held = _held_by_all(copies)
            self._on_lost(rank, link.partner, reason, others)
            if held is not None:
                self._on_replicated(rank, held)


class _Link:
    """A permanent connection to one partner, and the thread that sends on it."""

    def __init__(self, owner: Replicator, partner: Partner) -> None:
        self.partner = partner
        self._owner = owner
        self._changed = threading.Condition()
        self._pending: dict[int, _Offer] = {}
        self._stopped = False
        self._sock: socket.socket | None = None
        self._announced: dict[int, StateLayout] = {}
        self._reported_lost: set[int] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"replicate-{partner.agent}", daemon=True
        )
        self._thread.start()

    def offer(self, rank: int, offer: _Offer) -> None:
        with self._changed:
            self._pending[rank] = offer
            self._changed.notify()

    def stop(self) -> None:
        """Make the thread end soon, even during a push."""
        with self._changed:
            self._stopped = True
            self._pending.clear()
            self._changed.notify()
            if self._sock is not None:
                wire.shut(self._sock)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (taken := self._next_offer()) is not None:
            rank, offer = taken
            try:
                self._replicate(rank, offer)
                self._reported_lost.discard(rank)
            except (OSError, WorkersError) as error:
                self._handle_failure(rank, offer, error)
        self._disconnect()

    def _next_offer(self) -> tuple[int, _Offer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopped)
            if self._stopped:
                return None
            rank = next(iter(self._pending))
            return rank, self._pending.pop(rank)

    def _handle_failure(self, rank: int, offer: _Offer, error: Exception) -> None:
        self._disconnect()
        if self._stopped:
            return
        if rank not in self._reported_lost:
            self._reported_lost.add(rank)
            self._owner.lost(self, rank, f"{type(error).__name__}: {error}")
        with self._changed:
            self._pending.setdefault(rank, offer)
            self._changed.wait_for(lambda: self._stopped, self._owner.retry_s)

    def _replicate(self, rank: int, offer: _Offer) -> None:
        segment = self._owner.store.find(rank, Place.OWN)
        if segment is None:
            return  # dropped or adopted since the offer
        commit = segment.find(offer.attempt, offer.step)
        if commit is None:  # overwritten since the offer: send the newest one
            commit = next(iter(segment.commits()), None)
        if commit is None:
            return
        # Without the pin, a worker that commits faster than the link sends would overwrite the slot
        # during every push.
        with self._owner.pinned(rank, segment, commit):
            try:
                self._push(rank, segment, commit)
            except WireRefused as refusal:
                self._handle_refusal(rank, segment, commit, refusal)

    def _push(self, rank: int, segment: Segment, commit: Commit) -> None:
        credential = self._owner.credential(rank, commit)
        sock = self._connection()
        if self._announced.get(rank) != segment.layout:
            self._announce(sock, rank, segment, commit, credential)
        try:
            self._send(sock, rank, segment, commit, credential)
        except WireRefused as refusal:
            if refusal.code != RefusalCode.NO_LAYOUT:
                raise
            self._announce(sock, rank, segment, commit, credential)
            self._send(sock, rank, segment, commit, credential)
        self._owner.replicated(self, rank, commit)

    def _announce(
        self, sock: socket.socket, rank: int, segment: Segment, commit: Commit, credential: int
    ) -> None:
        """Announce the layout. If it replaces another one, send what lies beside `commit` first:
        the partner drops its former segment with the first commit of the new one."""
        layout = segment.layout
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
        answer = wire.receive_header(sock)
        for other in segment.commits() if answer.get("replaces") else ():
            if other.slot != commit.slot:
                self._send_beside(sock, rank, segment, other, credential)
        self._announced[rank] = layout

    def _send_beside(
        self, sock: socket.socket, rank: int, segment: Segment, commit: Commit, credential: int
    ) -> None:
        """Send a commit that no pin protects: if it is overwritten meanwhile, or damaged here, the
        partner goes without it."""
        try:
            self._send(sock, rank, segment, commit, credential)
        except WireRefused as refusal:
            self._handle_refusal(rank, segment, commit, refusal)

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
            **_beside(segment, commit),
        }
        wire.send_header(sock, header)
        answer = wire.receive_header(sock)
        if not answer.get("go"):
            return  # the partner holds it already
        # The payload must now be sent in full. If it is overwritten, the digest does not match.
        with segment.slot(commit) as payload:
            wire.send_payload(sock, payload[wire.int_field(answer, "from") :])
        wire.receive_header(sock)

    def _handle_refusal(
        self, rank: int, segment: Segment, commit: Commit, refusal: WireRefused
    ) -> None:
        if refusal.code == RefusalCode.FENCED:
            _log.info("a copy was refused", rank=rank, step=commit.step, refusal=str(refusal))
            return
        if refusal.code == RefusalCode.BAD_DIGEST:
            if not segment.is_current(commit):
                return  # overwritten while it was sent; the newer commit has been offered
            if not self._owner.store.check(rank, Place.OWN, commit):
                return  # damaged in this node's memory: the store has quarantined and reported it
        raise refusal

    def _connection(self) -> socket.socket:
        if self._sock is not None and wire.is_stale(self._sock):
            self._disconnect()
        if self._sock is None:
            sock = self._owner.dial(self.partner)
            with self._changed:
                self._sock = sock
                if self._stopped:
                    raise WireError("stopped")
        return self._sock

    def _disconnect(self) -> None:
        with self._changed:
            if self._sock is not None:
                self._sock.close()
            self._sock = None
        self._announced.clear()


def _beside(segment: Segment, commit: Commit) -> dict[str, int | str]:
    """The fields that name the owner's other commit. It is kept where `commit` may never become
    whole, so the partner keeps it too, if it has it."""
    for other in segment.commits():
        if other.slot != commit.slot:
            return {
                "beside_attempt": other.attempt,
                "beside_step": other.step,
                "beside_digest": other.digest,
            }
    return {}
