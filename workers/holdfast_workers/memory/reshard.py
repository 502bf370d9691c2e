"""Resharding from memory: fills a rank's segment from the memory checkpoints of another mesh.

A reshard ends with a verified commit in this node's own segment of the rank, or raises. Parts held
on this node are copied from its segments; the others are fetched from several agents in parallel,
and no byte is fetched twice. A source that fails is dropped, and a new plan is made from the
remaining sources.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from holdfast_workers.checkpoint.moves import Move, MoveSource, NotCovered, Plan, plan_moves
from holdfast_workers.checkpoint.pieces import Array, batches, view_of
from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.box_transfer import BoxChannel
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment import Commit, Overwritten, Segment, SegmentError
from holdfast_workers.memory.segment_store import NothingHeld, SegmentStore
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Timeouts, WireError, WireRefused
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore
from holdfast_workers.state.digest import interruptible_digest
from holdfast_workers.state.layout import StateLayout, aligned
from holdfast_workers.state.object_room import rooms, with_rooms

STREAMS = 4
"""Number of agents that one rank fetches from in parallel."""

LOCAL_PIECE_BYTES = 1 << 24
"""Bytes copied on this node between two checks of the deadline and of the fence."""


class EntryNotProvided(WorkersError):
    """An entry that no source can provide was not provided by the rank either."""


class Reshard:
    """The reshard of one rank from a state of another mesh.

    `on_connected(sock)` is called with every new connection before its first use: shutting the
    socket down ends its use at once. It is also called with None, repeatedly during the work and
    before the commit. If it raises, the reshard ends with that exception.
    """

    def __init__(
        self,
        secret: bytes,
        agent: str,
        source: Restore,
        rank: int,
        store: SegmentStore,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        on_connected: Callable[[socket.socket | None], None] = lambda _: None,
        tls: PeerTls | None = None,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._agent = agent
        self._source = source
        self._rank = rank
        self._store = store
        self._source_store = store.for_mesh(source.mesh)
        self._timeouts = timeouts
        self._on_connected = on_connected
        self._layouts: dict[int, StateLayout] = {}
        self._channels: dict[str, BoxChannel] = {}
        self._lost: dict[Origin, str] = {}
        self._lost_lock = threading.Lock()
        self._deadline = 0.0

    def run(self, from_rank: Mapping[str, bytes], timeout_s: float) -> Held:
        """Fill and commit the own segment, which the rank has created.

        `from_rank`: content by name of the entries that no source can provide. Moves nothing if the
        state is already present. Raises SourceLost, EntryNotProvided, a SegmentError, or the
        exception of `on_connected`."""
        self._deadline = time.monotonic() + timeout_s
        store, rank, source = self._store, self._rank, self._source
        segment = store.find(rank, Place.OWN)
        if segment is None:
            raise NothingHeld(f"rank {rank} has created no segment in {store.folder}")
        held = segment.find(source.attempt, source.step)
        if held is not None and store.check(rank, Place.OWN, held, self._check_cancelled):
            return store.describe(rank, Place.OWN, held)
        with store.writing(rank, Place.OWN):
            return store.describe(rank, Place.OWN, self._write(segment, from_rank))

    def _write(self, segment: Segment, from_rank: Mapping[str, bytes]) -> Commit:
        attempt, step = self._source.attempt, self._source.step
        pool = ThreadPoolExecutor(STREAMS, "reshard")
        try:
            segment = self._with_room(segment, pool)
            slot = segment.begin(step)
            while not self._fill(slot, segment.layout, from_rank, pool):
                pass
            digest = interruptible_digest(slot, self._check_cancelled)
            self._check_cancelled()
            return segment.commit(attempt=attempt, step=step, digest=digest)
        finally:
            for channel in tuple(self._channels.values()):
                wire.shut(channel.sock)
            pool.shutdown(cancel_futures=True)  # no thread writes to the slot after this
            for channel in self._channels.values():
                channel.sock.close()

    def _with_room(self, segment: Segment, pool: ThreadPoolExecutor) -> Segment:
        """The own segment with the room that objects have in the source: the rank's own of the same
        mesh, else rank 0's, else the largest."""
        self._fetch_unknown_layouts(pool)
        found = {rank: rooms(layout) for rank, layout in self._layouts.items()}
        same = self._source.mesh == self._store.mesh
        chosen = found.get(self._rank) if same else found.get(0)
        if chosen is None:
            names = {name for of_rank in found.values() for name in of_rank}
            chosen = {name: max(of.get(name, 0) for of in found.values()) for name in names}
        return self._store.ensure(self._rank, Place.OWN, with_rooms(segment.layout, chosen))

    def _fill(
        self,
        slot: memoryview,
        layout: StateLayout,
        from_rank: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
    ) -> bool:
        """Write all of `slot` according to one plan. False if a source was lost meanwhile."""
        origins, plan = self._plan(layout, pool)
        _fill_rest(slot, layout, plan.left, from_rank)
        by_agent: dict[str, list[tuple[Origin, Sequence[Move]]]] = {}
        for number, moves in plan.by_source().items():
            by_agent.setdefault(origins[number].agent, []).append((origins[number], moves))
        lost = len(self._lost)
        running = [
            pool.submit(self._transfer_from_agent, parts, slot, layout)
            for parts in by_agent.values()
        ]
        for transfer in running:
            transfer.result()
        return len(self._lost) == lost

    def _plan(self, layout: StateLayout, pool: ThreadPoolExecutor) -> tuple[list[Origin], Plan]:
        """Fetch the unknown layouts, then plan over the sources that are not lost."""
        self._fetch_unknown_layouts(pool)
        origins = [origin for origin in self._source.origins if origin not in self._lost]
        sources = [
            MoveSource(
                origin.agent, origin.rank, self._layouts[origin.rank], near=self._is_local(origin)
            )
            for origin in origins
        ]
        same = self._source.mesh == self._store.mesh
        try:
            return origins, plan_moves(layout, sources, self._rank, same_mesh=same)
        except NotCovered as error:
            reason = "; ".join([str(error), *dict.fromkeys(self._lost.values())])
            raise SourceLost(reason, tuple(self._lost)) from error

    def _fetch_unknown_layouts(self, pool: ThreadPoolExecutor) -> None:
        while unknown := self._unknown_layouts():
            list(pool.map(self._fetch_layouts, unknown))

    def _unknown_layouts(self) -> list[list[Origin]]:
        """One holder of every rank whose layout is unknown (this node if it is one), grouped by
        agent."""
        chosen: dict[int, Origin] = {}
        for origin in self._source.origins:
            if origin in self._lost or origin.rank in self._layouts:
                continue
            if origin.rank not in chosen or self._is_local(origin):
                chosen[origin.rank] = origin
        found: dict[str, list[Origin]] = {}
        for origin in chosen.values():
            found.setdefault(origin.agent, []).append(origin)
        return list(found.values())

    def _fetch_layouts(self, origins: Sequence[Origin]) -> None:
        """Fetch the layouts of some ranks from one agent."""
        for origin in origins:
            self._attempt_source(origin, partial(self._fetch_layout, origin))

    def _fetch_layout(self, origin: Origin) -> None:
        if self._is_local(origin):
            self._layouts[origin.rank] = self._local_commit(origin)[0].layout
        else:
            self._layouts[origin.rank] = self._channel(origin).layout(origin, self._deadline)

    def _transfer_from_agent(
        self, parts: Sequence[tuple[Origin, Sequence[Move]]], slot: memoryview, layout: StateLayout
    ) -> None:
        """Write all moves from one agent; runs in a pool thread."""
        for origin, moves in parts:
            views = [view_of(slot, layout.tensors[move.tensor], move.box) for move in moves]
            self._attempt_source(origin, partial(self._transfer, origin, moves, views))

    def _transfer(self, origin: Origin, moves: Sequence[Move], views: Sequence[Array]) -> None:
        if not self._is_local(origin):
            self._channel(origin).take(origin, moves, views, self._deadline)
            return
        segment, commit = self._local_commit(origin)
        if not self._source_store.check_once(
            origin.rank, origin.place, commit, self._check_deadline
        ):
            raise Overwritten(f"{segment.path}: step {commit.step} is damaged")
        payload, tensors = segment.payload(commit), segment.layout.tensors
        source_views = [view_of(payload, tensors[move.source_tensor], move.box) for move in moves]
        for there, here in zip(
            batches(source_views, LOCAL_PIECE_BYTES), batches(views, LOCAL_PIECE_BYTES), strict=True
        ):
            self._check_deadline()
            for source, target in zip(there, here, strict=True):
                target[...] = source
        if not segment.is_current(commit):
            raise Overwritten(f"{segment.path}: step {commit.step} was overwritten")

    def _attempt_source(self, origin: Origin, work: Callable[[], None]) -> None:
        """Run `work`, which needs `origin`. A source that fails is not used again."""
        if origin in self._lost:
            return
        try:
            work()
        except (WireRefused, SegmentError) as error:
            self._mark_lost([origin], error)
        except (OSError, WireError) as error:
            channel = self._channels.pop(origin.agent, None)
            if channel is not None:
                channel.sock.close()
            self._mark_lost([o for o in self._source.origins if o.agent == origin.agent], error)

    def _mark_lost(self, origins: Sequence[Origin], error: Exception) -> None:
        with self._lost_lock:
            for origin in origins:
                self._lost.setdefault(origin, f"{origin.agent}, rank {origin.rank}: {error}")

    def _channel(self, origin: Origin) -> BoxChannel:
        """The connection to the agent; only one thread at a time uses it."""
        channel = self._channels.get(origin.agent)
        if channel is None:
            self._check_deadline()
            channel = self._channels[origin.agent] = BoxChannel.connect(
                self._secret, origin.host, origin.data_port, self._source, self._timeouts, self._tls
            )
            self._on_connected(channel.sock)
        return channel

    def _check_cancelled(self) -> None:
        """Let the caller raise if the reshard must stop (a fence)."""
        self._on_connected(None)

    def _check_deadline(self) -> None:
        """Check for cancellation, and raise TimeoutError at the deadline. Called while a source is
        used."""
        self._check_cancelled()
        if time.monotonic() >= self._deadline:
            raise TimeoutError("the reshard was not done by its deadline")

    def _local_commit(self, origin: Origin) -> tuple[Segment, Commit]:
        segment = self._source_store.find(origin.rank, origin.place)
        attempt, step = self._source.attempt, self._source.step
        commit = segment.find(attempt, step, digest=origin.digest) if segment else None
        if segment is None or commit is None or commit.digest != origin.digest:
            raise NothingHeld(f"{origin.place} of rank {origin.rank} is no longer held")
        return segment, commit

    def _is_local(self, origin: Origin) -> bool:
        return origin.agent == self._agent


def _fill_rest(
    slot: memoryview, layout: StateLayout, names: Sequence[str], from_rank: Mapping[str, bytes]
) -> None:
    """Write the bytes that no move covers: the entries in `names`, and the zero padding."""
    for entry in layout.tensors:
        end, padded = entry.offset + entry.nbytes, entry.offset + aligned(entry.nbytes)
        slot[end:padded] = bytes(padded - end)
        if entry.name in names:
            content = from_rank.get(entry.name, b"")
            if len(content) != entry.nbytes:
                raise EntryNotProvided(
                    f"{entry.name} has {entry.nbytes} bytes, the rank provided {len(content)}"
                )
            slot[entry.offset : end] = content
