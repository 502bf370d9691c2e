"""Which shards of a job a node's cache holds at a position, and in which order they come. Pure.

If the cache may keep all of them, it does, and those that are read next come first. Otherwise, or
once other jobs have taken its room, it holds groups: those of the window of samples that is read
and of the next one, for another reader may be a window ahead; then groups that follow, in the order
in which they are begun.

So what is held is the beginning of one list, whose first groups go as they are read to their end.
While positions grow, no shard leaves it before, and there is always room for what two windows read.
The first shards of the list are those that the window reads: only they may keep others from having
room, so that nodes with one cache, which read successive windows, do not block each other. What
evaluations read follows them, and is held all the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from math import ceil

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.token_order import PoolSizes, TokenOrder
from holdfast_workers.data.token_set import ShardFacts, TokenSet
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE

WINDOWS = 2
"""Successive windows that readers of one node read at a time."""
GROUPS = 2
"""Groups of a pool that are held at a time: the one that is read, and the next one."""
LEAST_HELD_BYTES = 1_000_000_000
"""Held, if there is room, however small the groups are."""


@dataclass(frozen=True)
class KeptShards:
    """Shards that are held all the time, beside those of the order, and the manifests that name
    them."""

    shards: Sequence[ShardFacts] = ()
    sets: Sequence[TokenSet] = ()


class FetchPlan:
    """Of the shards of some sets. Readers read windows of `window_samples` positions."""

    def __init__(
        self,
        order: TokenOrder,
        sets: Sequence[TokenSet],
        window_samples: int,
        shuffle_bytes: int,
        limit_bytes: int,
        kept: KeptShards = KeptShards(),
    ) -> None:
        """`limit_bytes`: the most that the cache keeps, manifests included. Raises CorpusError if
        that is too little."""
        self.order = order
        self._shards = [shard for each in sets for shard in each.shards]
        self._window = window_samples
        self._kept = [*{shard.digest: shard for shard in kept.shards}.values()]
        all_sets = {each.digest: each for each in (*sets, *kept.sets)}.values()
        manifests = sum(len(each.encode()) for each in all_sets)
        self._kept_bytes = sum(shard.nbytes for shard in self._kept)
        always = manifests + self._kept_bytes
        self.nbytes = sum({shard.digest: shard.nbytes for shard in self._shards}.values())
        """Of all distinct shards."""
        self.keeps_all = always + self.nbytes <= limit_bytes
        """Whether all shards are held, once they are there."""
        needed = min(self.nbytes, self._needed(shuffle_bytes))
        if always + needed > limit_bytes:
            raise CorpusError(self._refusal(always, needed, shuffle_bytes, limit_bytes))
        self._held_by_groups = min(limit_bytes - always, max(needed, LEAST_HELD_BYTES))
        self.held_bytes = self.nbytes if self.keeps_all else self._held_by_groups
        """The most bytes of shards that are held, but for those that always are."""

    def go_by_groups(self) -> None:
        """Hold no more than a small cache could, from now on: others need its room."""
        self.keeps_all = False
        self.held_bytes = min(self.nbytes, self._held_by_groups)

    def phase(self, window: int | None) -> Hashable:
        """While it stays the same, so does what is held, and what is read of it."""
        if window is None:
            return self.keeps_all
        first = self.order.places_at(window * self._window)
        return first, tuple(shard.digest for shard in self.read(window))

    def read(self, window: int | None) -> list[ShardFacts]:
        """The distinct shards of the groups that this window reads, and those that evaluations
        read: the first ones of `held`. None: it is not known which one is read."""
        return [] if window is None else _distinct([*self._read_of_order(window), *self._kept])

    def _read_of_order(self, window: int) -> list[ShardFacts]:
        start = window * self._window
        groups = self.order.groups_between(start, start + self._window)
        shards = (self._shards[number] for group in groups for number in group.shards)
        return _distinct(shards)

    def held(self, window: int | None) -> list[ShardFacts]:
        """The distinct shards that are held while this window is read, in the order in which they
        come. None: all or none, until it is known which one is read."""
        if window is None and not self.keeps_all:
            return []
        window = window or 0
        return _distinct([*self.read(window), *self._held_of_order(window)])

    def _held_of_order(self, window: int) -> list[ShardFacts]:
        held: dict[str, ShardFacts] = {}
        left = self.held_bytes
        for group in self.order.groups_from(window * self._window):
            for shard in (self._shards[number] for number in group.shards):
                if shard.digest in held:
                    continue
                left -= shard.nbytes
                if left < 0:
                    return [*held.values()]
                held[shard.digest] = shard
        return [*held.values()]

    def _needed(self, shuffle_bytes: int) -> int:
        """At least the bytes of the groups that `WINDOWS` windows touch, and of `GROUPS` groups of
        each pool."""
        return sum(map(ceil, self._needed_of_pools(shuffle_bytes)))

    def _needed_of_pools(self, shuffle_bytes: int) -> Iterable[float]:
        for pool in self.order.pool_sizes():
            group = max(self.order.group_bytes(pool.pool, shuffle_bytes), pool.largest_shard)
            # The first and the last group of a stretch may be touched by a sample only; those
            # between them have no more windows than the stretch.
            between = (self._most_samples(pool) - GROUPS) * pool.window_bytes
            yield min(pool.nbytes, GROUPS * group + max(0.0, between))

    def _most_samples(self, pool: PoolSizes) -> int:
        return self.order.mixture.most_of(pool.pool, WINDOWS * self._window)

    def _refusal(self, always: int, needed: int, shuffle_bytes: int, limit_bytes: int) -> str:
        """`always`: bytes that are held all the time."""
        fitting = self._most_shuffled(shuffle_bytes, limit_bytes - always)
        less = "; a smaller data.shuffle_gb alone does not help"
        if (fits := in_gb(fitting, ROUND_FLOOR)) != "0":
            less = f", or data.shuffle_gb to at most {fits}"
        evaluated = ""
        if self._kept_bytes:
            evaluated = f", what its evaluations read {in_gb(self._kept_bytes)} GB"
            less += "; with fewer evaluate.batches, evaluations read less"
        return (
            f"the token sets of this job have {in_gb(self.nbytes)} GB{evaluated}, and the cache of "
            f"a node keeps at most {in_gb(limit_bytes, ROUND_FLOOR)} GB: that is too little for "
            f"{GROUPS} groups of data.shuffle_gb, or for what {WINDOWS} steps read: set "
            f"{LIMIT_VARIABLE} on the nodes to at least {in_gb(always + needed)}{less}"
        )

    def _most_shuffled(self, too_many: int, room: int) -> int:
        """The largest `shuffle_bytes` that need no more room; 0 without one."""
        fits, fails = 0, too_many
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._needed(middle) <= room else (fits, middle)
        return fits


def _distinct(shards: Iterable[ShardFacts]) -> list[ShardFacts]:
    return [*{shard.digest: shard for shard in shards}.values()]


def in_gb(nbytes: int, rounding: str = ROUND_CEILING) -> str:
    """Three digits, in units of 10^9 bytes."""
    digits = Context(prec=3, rounding=rounding).create_decimal(nbytes)
    return f"{float(digits / Decimal(10**9)):.3g}"
