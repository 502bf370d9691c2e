"""The window of tokens at each position of training, over token sets: a pure function of (seed,
position), found in O(log n).

A sample is a window of `sequence_length` targets of one shard, and of the tokens before them; the
last window of a shard may have fewer. So each token of a shard but its first is a target of exactly
one sample. Samples are numbered over sources, their shards and the windows of these.

The sources are one pool of shards or, with weights, a pool each, between which a `Mixture` chooses.
Each pool has epochs of its own. In an epoch its shards are permuted and cut into groups of at most
`shuffle_bytes`; the windows of a group are permuted, and the groups follow each other. So a reader
needs one group of each pool at a time, and windows of different groups are never mixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.data.mixture import Mixture
from holdfast_workers.data.sample_order import Indices, derived_seed, permute
from holdfast_workers.data.token_set import TokenSet

_TABLES = 4
"""Epochs of a pool whose tables are kept: a step may span several epochs of a small source."""
_OF_SHARDS = 0
"""Part of the seeds that permute shards; those of groups are numbered from 1."""


@dataclass(frozen=True)
class SourceShards:
    """The sizes of a source's shards, in their order."""

    tokens: Sequence[int]
    nbytes: Sequence[int]

    @classmethod
    def of(cls, token_set: TokenSet) -> SourceShards:
        shards = token_set.shards
        return cls([shard.tokens for shard in shards], [shard.nbytes for shard in shards])


@dataclass(frozen=True)
class TokenGroup:
    """Shards whose windows are read together."""

    pool: int
    epoch: int
    number: int
    """In the epoch, from 0."""
    shards: tuple[int, ...]
    """Counted over all sources."""
    begin: int
    """The position of its first sample."""


@dataclass(frozen=True)
class PoolSizes:
    """What bounds the groups of a pool."""

    pool: int
    nbytes: int
    """Of all its shards."""
    largest_shard: int
    window_bytes: float
    """The most bytes of a shard for each of its windows."""


class TokenOrder:
    """The order of the samples of some sources."""

    def __init__(
        self,
        sources: Sequence[SourceShards],
        weights: Sequence[float] | None,
        sequence_length: int,
        seed: int,
        shuffle_bytes: int,
    ) -> None:
        """Without `weights`, an epoch has each sample once; with weights, `shuffle_bytes` is
        divided in their proportion. Raises ValueError if a source has no shards, or a shard fewer
        than two tokens."""
        self._length = sequence_length
        self._tokens = _joined([source.tokens for source in sources])
        nbytes = _joined([source.nbytes for source in sources])
        shards_of = np.array([len(source.tokens) for source in sources], dtype=np.int64)
        if not len(sources) or not shards_of.all() or self._tokens.min() < 2:
            raise ValueError("each source needs a shard, and each shard at least two tokens")
        windows = -(-(self._tokens - 1) // sequence_length)
        self._shard_starts = _starts(windows)
        self._first_shards = _starts(shards_of)
        self.mixture = Mixture(weights if weights is not None else [1.0])
        self._is_mixed = weights is not None
        if weights is not None and len(weights) != len(sources):
            raise ValueError(f"{len(weights)} weights for {len(sources)} sources")
        ends = self._first_shards if self._is_mixed else self._first_shards[[0, -1]]
        self._pools = [
            _Pool(
                np.arange(first, last),
                windows[first:last],
                self._shard_starts[first:last],
                nbytes[first:last],
                derived_seed(seed, number),
                self.group_bytes(number, shuffle_bytes),
            )
            for number, (first, last) in enumerate(pairwise(ends))
        ]

    @property
    def samples(self) -> int:
        """Of one epoch of all sources."""
        return int(self._shard_starts[-1])

    def samples_at(self, positions: Indices) -> Indices:
        """The sample at each position of the run; positions may span epochs."""
        pools, indices = self.mixture.choose(positions)
        order = np.empty_like(positions)
        for pool in np.unique(pools):
            chosen = pools == pool
            order[chosen] = self._pools[pool].samples_at(indices[chosen])
        return order

    def windows_of(self, samples: Indices) -> tuple[Indices, Indices]:
        """The shard of each sample, counted over all sources, and the number of its first token."""
        shards = np.searchsorted(self._shard_starts, samples, "right") - 1
        return shards, (samples - self._shard_starts[shards]) * self._length

    def targets_of(self, samples: Indices) -> Indices:
        """The number of targets of each sample."""
        shards, starts = self.windows_of(samples)
        targets: Indices = np.minimum(self._length, self._tokens[shards] - 1 - starts)
        return targets

    def source_of(self, samples: Indices) -> Indices:
        """The source of each sample."""
        shards, _ = self.windows_of(samples)
        return np.searchsorted(self._first_shards, shards, "right") - 1

    def epochs_before(self, position: int) -> tuple[float, ...]:
        """How many epochs of each source the positions before this one have read; without weights,
        on average over the sources."""
        counts = self.mixture.counts(position)
        epochs = [count / pool.size for count, pool in zip(counts, self._pools, strict=True)]
        return tuple(epochs if self._is_mixed else epochs * (len(self._first_shards) - 1))

    def places_at(self, position: int) -> tuple[tuple[int, int], ...]:
        """The epoch, and the number of the group, of each pool's next sample at this position or
        later. While they stay the same, no group has been read to its end."""
        counts = self.mixture.counts(position)
        return tuple(pool.place_of(count) for count, pool in zip(counts, self._pools, strict=True))

    def groups_from(self, position: int) -> Iterator[TokenGroup]:
        """The groups that are read from this position on, by the positions at which they begin; of
        each pool, until they have named each of its shards."""
        counts = self.mixture.counts(position)
        return merge(
            *(self._groups_of(pool, count) for pool, count in enumerate(counts)),
            key=lambda group: group.begin,
        )

    def groups_between(self, start: int, end: int) -> list[TokenGroup]:
        """The groups of the samples at the positions from `start` to `end`, which is excluded."""
        return [*takewhile(lambda group: group.begin < end, self.groups_from(start))]

    def group_bytes(self, pool: int, shuffle_bytes: int) -> int:
        """The part of `shuffle_bytes` that a group of the pool gets."""
        return shuffle_bytes * self.mixture.weights[pool] // self.mixture.total

    def pool_sizes(self) -> list[PoolSizes]:
        return [pool.sizes(number) for number, pool in enumerate(self._pools)]

    def _groups_of(self, number: int, count: int) -> Iterator[TokenGroup]:
        for epoch, group, index, shards in self._pools[number].groups_from(count):
            begin = self.mixture.position(number, index)
            yield TokenGroup(number, epoch, group, shards, begin)


@dataclass(frozen=True)
class _EpochTable:
    """The shards of a pool in the order of an epoch, and where they and their groups begin."""

    order: Indices
    shard_starts: Indices
    """(shards + 1,): in windows of the epoch."""
    cuts: Indices
    """(groups + 1,): of each group, its first shard in `order`."""
    group_starts: Indices
    """(groups + 1,): in windows of the epoch."""


class _Pool:
    """Shards of which each epoch has all windows once."""

    def __init__(
        self,
        shards: Indices,
        windows: Indices,
        first_samples: Indices,
        nbytes: Indices,
        seed: int,
        shuffle_bytes: int,
    ) -> None:
        self.size = int(windows.sum())
        self._shards = shards
        self._windows = windows
        self._first_samples = first_samples
        self._nbytes = nbytes
        self._seed = seed
        self._shuffle_bytes = shuffle_bytes
        self._table = lru_cache(_TABLES)(self._new_table)  # which several threads may call

    def samples_at(self, indices: Indices) -> Indices:
        epochs, within = np.divmod(indices, self.size)
        samples = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            samples[chosen] = self._samples_of(epoch, within[chosen])
        return samples

    def place_of(self, index: int) -> tuple[int, int]:
        """The epoch and the number of the group of a window."""
        epoch, within = divmod(index, self.size)
        starts = self._table(epoch).group_starts
        return epoch, int(np.searchsorted(starts, within, "right")) - 1

    def groups_from(self, index: int) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """From the group of a window on, until each shard was in one: the epoch, the number, the
        index of the first window, and the shards."""
        epoch, number = self.place_of(index)
        unseen = set(self._shards.tolist())
        while unseen:
            table = self._table(epoch)
            own = table.order[table.cuts[number] : table.cuts[number + 1]]
            shards = tuple(self._shards[own].tolist())
            yield epoch, number, epoch * self.size + int(table.group_starts[number]), shards
            unseen -= set(shards)
            is_last = number + 2 == len(table.cuts)
            epoch, number = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def sizes(self, number: int) -> PoolSizes:
        return PoolSizes(
            number,
            int(self._nbytes.sum()),
            int(self._nbytes.max()),
            float((self._nbytes / self._windows).max()),
        )

    def _samples_of(self, epoch: int, within: Indices) -> Indices:
        table = self._table(epoch)
        groups = np.searchsorted(table.group_starts, within, "right") - 1
        starts = table.group_starts[groups]
        read = np.empty_like(within)
        for group in np.unique(groups).tolist():
            chosen = groups == group
            first, last = table.group_starts[group : group + 2].tolist()
            seed = derived_seed(self._seed, 1 + group)
            read[chosen] = permute((within - starts)[chosen], last - first, seed, epoch)
        read += starts
        places = np.searchsorted(table.shard_starts, read, "right") - 1
        return self._first_samples[table.order[places]] + read - table.shard_starts[places]

    def _new_table(self, epoch: int) -> _EpochTable:
        count = len(self._shards)
        order = permute(np.arange(count), count, derived_seed(self._seed, _OF_SHARDS), epoch)
        shard_starts, byte_starts = _starts(self._windows[order]), _starts(self._nbytes[order])
        cuts = [0]
        while cuts[-1] < count:
            most = byte_starts[cuts[-1]] + self._shuffle_bytes
            fitting = int(np.searchsorted(byte_starts, most, "right")) - 1
            cuts.append(max(fitting, cuts[-1] + 1))
        ends = np.array(cuts, dtype=np.int64)
        return _EpochTable(order, shard_starts, ends, shard_starts[ends])


def _joined(parts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array([size for part in parts for size in part], dtype=np.int64)


def _starts(sizes: Indices) -> Indices:
    """(n + 1,): the sum of the sizes before each, and of all."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
