"""Filling a rank's segment from what ranks of another mesh have in memory, on any nodes.

Ends with a commit of every byte in this node's own segment of the rank, or with a reason. What
lies on this node is copied from its segments; the rest comes from several agents at once, no byte
of it twice. A source that fails is given up, and the plan is made anew from those that are left.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from holdfast_workers.checkpoint.moves import Move, NotCovered, Plan, Source, plan_moves
from holdfast_workers.checkpoint.pieces import Array, batches, view_of
from holdfast_workers.errors import WorkersError
from holdfast_workers.memory import wire
from holdfast_workers.memory.box_transfer import BoxChannel
from holdfast_workers.memory.fetch import SourceLost
from holdfast_workers.memory.segment import Commit, Overtaken, Segment, SegmentError
from holdfast_workers.memory.segment_store import NothingHeld, SegmentStore
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Refused, Timeouts, WireError
from holdfast_workers.protocol.messages import Held, Origin, Place, Restore
from holdfast_workers.state.digest import digest_unless
from holdfast_workers.state.layout import StateLayout, aligned

STREAMS = 4
"""Agents that are asked at a time, by one rank."""

COPIED_PIECE = 1 << 24
"""Bytes copied on this node between two looks at the clock and for a fence."""


class NotGiven(WorkersError):
    """An entry that no source can give was not given by the rank either."""


class Reshard:
    """One rank's way to a state of another mesh.

    `on_connected(sock)` gets every connection before it is used: who shuts it makes its use end at
    once. It may raise, and is asked with None too, all along and before anything is committed.
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
    ) -> None:
        self._secret = secret
        self._agent = agent
        self._source = source
        self._rank = rank
        self._store = store
        self._source_store = store.of(source.mesh)
        self._timeouts = timeouts
        self._on_connected = on_connected
        self._layouts: dict[int, StateLayout] = {}
        self._channels: dict[str, BoxChannel] = {}
        self._lost: dict[Origin, str] = {}
        self._losing = threading.Lock()
        self._deadline = 0.0

    def run(self, left: Mapping[str, bytes], timeout_s: float) -> Held:
        """Fill and commit the own segment, which the rank has made; entries that no source can
        give are taken from `left`. Raises SourceLost, NotGiven, a SegmentError, or what
        `on_connected` raised. Moves nothing if the state lies there already."""
        self._deadline = time.monotonic() + timeout_s
        store, rank, source = self._store, self._rank, self._source
        segment = store.find(rank, Place.OWN)
        if segment is None:
            raise NothingHeld(f"rank {rank} has made no segment in {store.folder}")
        held = segment.find(source.attempt, source.step)
        if held is not None and store.check(rank, Place.OWN, held, self._hear):
            return store.describe(rank, Place.OWN, held)
        with store.writing(rank, Place.OWN):
            return store.describe(rank, Place.OWN, self._write(segment, left))

    def _write(self, segment: Segment, left: Mapping[str, bytes]) -> Commit:
        attempt, step = self._source.attempt, self._source.step
        pool = ThreadPoolExecutor(STREAMS, "reshard")
        try:
            slot = segment.begin(step)
            while not self._fill(slot, segment.layout, left, pool):
                pass
            digest = digest_unless(slot, self._hear)
            self._hear()
            return segment.commit(attempt=attempt, step=step, digest=digest)
        finally:
            for channel in tuple(self._channels.values()):
                wire.shut(channel.sock)
            pool.shutdown(cancel_futures=True)  # nobody writes to the slot from here on
            for channel in self._channels.values():
                channel.sock.close()

    def _fill(
        self,
        slot: memoryview,
        layout: StateLayout,
        left: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
    ) -> bool:
        """Write all of `slot` by one plan; False if a source was lost on the way."""
        origins, plan = self._plan(layout, pool)
        _fill_rest(slot, layout, plan.left, left)
        by_agent: dict[str, list[tuple[Origin, Sequence[Move]]]] = {}
        for number, moves in plan.by_source().items():
            by_agent.setdefault(origins[number].agent, []).append((origins[number], moves))
        lost = len(self._lost)
        running = [pool.submit(self._take_all, parts, slot, layout) for parts in by_agent.values()]
        for one in running:
            one.result()
        return len(self._lost) == lost

    def _plan(self, layout: StateLayout, pool: ThreadPoolExecutor) -> tuple[list[Origin], Plan]:
        """A plan over the sources that are not lost, once the layout of each rank is known."""
        while lacking := self._lacking_layouts():
            list(pool.map(self._learn, lacking))
        origins = [one for one in self._source.origins if one not in self._lost]
        sources = [
            Source(one.agent, one.rank, self._layouts[one.rank], near=self._is_near(one))
            for one in origins
        ]
        same = self._source.mesh == self._store.mesh
        try:
            return origins, plan_moves(layout, sources, self._rank, same_mesh=same)
        except NotCovered as error:
            why = "; ".join([str(error), *dict.fromkeys(self._lost.values())])
            raise SourceLost(why, tuple(self._lost)) from error

    def _lacking_layouts(self) -> list[list[Origin]]:
        """For every rank whose layout is unknown one holder, on this node if there is one; by
        agent."""
        chosen: dict[int, Origin] = {}
        for one in self._source.origins:
            if one in self._lost or one.rank in self._layouts:
                continue
            if one.rank not in chosen or self._is_near(one):
                chosen[one.rank] = one
        found: dict[str, list[Origin]] = {}
        for one in chosen.values():
            found.setdefault(one.agent, []).append(one)
        return list(found.values())

    def _learn(self, origins: Sequence[Origin]) -> None:
        """Ask one agent for the layouts of some ranks."""
        for one in origins:
            self._try(one, partial(self._learn_layout, one))

    def _learn_layout(self, origin: Origin) -> None:
        if self._is_near(origin):
            self._layouts[origin.rank] = self._here(origin)[0].layout
        else:
            self._layouts[origin.rank] = self._channel(origin).layout(origin, self._deadline)

    def _take_all(
        self, parts: Sequence[tuple[Origin, Sequence[Move]]], slot: memoryview, layout: StateLayout
    ) -> None:
        """Write what one agent gives; in a thread of its own."""
        for origin, moves in parts:
            views = [view_of(slot, layout.tensors[move.tensor], move.box) for move in moves]
            self._try(origin, partial(self._take, origin, moves, views))

    def _take(self, origin: Origin, moves: Sequence[Move], views: Sequence[Array]) -> None:
        if not self._is_near(origin):
            self._channel(origin).take(origin, moves, views, self._deadline)
            return
        segment, commit = self._here(origin)
        if not self._source_store.check_once(origin.rank, origin.place, commit, self._look):
            raise Overtaken(f"{segment.path}: step {commit.step} is damaged")
        payload, tensors = segment.payload(commit), segment.layout.tensors
        theirs = [view_of(payload, tensors[move.source_tensor], move.box) for move in moves]
        for there, here in zip(
            batches(theirs, COPIED_PIECE), batches(views, COPIED_PIECE), strict=True
        ):
            self._look()
            for source, target in zip(there, here, strict=True):
                target[...] = source
        if not segment.is_current(commit):
            raise Overtaken(f"{segment.path}: step {commit.step} was overwritten")

    def _try(self, origin: Origin, work: Callable[[], None]) -> None:
        """Do what needs a source; one that fails is not asked again."""
        if origin in self._lost:
            return
        try:
            work()
        except (Refused, SegmentError) as error:
            self._lose([origin], error)
        except (OSError, WireError) as error:
            channel = self._channels.pop(origin.agent, None)
            if channel is not None:
                channel.sock.close()
            self._lose([o for o in self._source.origins if o.agent == origin.agent], error)

    def _lose(self, origins: Sequence[Origin], error: Exception) -> None:
        with self._losing:
            for one in origins:
                self._lost.setdefault(one, f"{one.agent}, rank {one.rank}: {error}")

    def _channel(self, origin: Origin) -> BoxChannel:
        """The connection to the agent, which one thread at a time speaks on."""
        channel = self._channels.get(origin.agent)
        if channel is None:
            self._look()
            channel = self._channels[origin.agent] = BoxChannel.connect(
                self._secret, origin.host, origin.data_port, self._source, self._timeouts
            )
            self._on_connected(channel.sock)
        return channel

    def _hear(self) -> None:
        """Raise what the caller does if this is not to go on."""
        self._on_connected(None)

    def _look(self) -> None:
        """The same while a source is used, which has until the deadline."""
        self._hear()
        if time.monotonic() >= self._deadline:
            raise TimeoutError("it was not done by the deadline")

    def _here(self, origin: Origin) -> tuple[Segment, Commit]:
        segment = self._source_store.find(origin.rank, origin.place)
        commit = segment.find(self._source.attempt, self._source.step) if segment else None
        if segment is None or commit is None or commit.digest != origin.digest:
            raise NothingHeld(f"{origin.place} of rank {origin.rank} is not here any more")
        return segment, commit

    def _is_near(self, origin: Origin) -> bool:
        return origin.agent == self._agent


def _fill_rest(
    slot: memoryview, layout: StateLayout, names: Sequence[str], left: Mapping[str, bytes]
) -> None:
    """What no move writes: the entries in `names`, and zeros between the tensors."""
    for entry in layout.tensors:
        end, padded = entry.offset + entry.nbytes, entry.offset + aligned(entry.nbytes)
        slot[end:padded] = bytes(padded - end)
        if entry.name in names:
            given = left.get(entry.name, b"")
            if len(given) != entry.nbytes:
                raise NotGiven(f"{entry.name} takes {entry.nbytes} bytes, given are {len(given)}")
            slot[entry.offset : end] = given
