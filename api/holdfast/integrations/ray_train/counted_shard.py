"""A rank's shard of a Ray dataset: the iterator of Ray Data, which counts what the function takes,
and leaves out what it took before the checkpoint.

All ways to iterate (`iter_batches`, `iter_torch_batches`, `iter_rows`, ...) reach `_iter_batches`,
which is private to Ray Data; `versions.py` says with which versions this is tested.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import ray
import structlog
from ray.data import DataContext, DataIterator, Schema
from ray.data._internal.execution.interfaces import RefBundle
from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry
from ray.data.block import BlockAccessor

from holdfast.integrations.ray_train.shard_position import EpochCounter, ShardPosition

_log = structlog.get_logger()
DEFAULT_BATCH = 256
"""Rows of a batch, as in Ray Data."""


class _OverStream(DataIterator):  # type: ignore[misc]  # Ray has no types
    """An iterator with the facts of the stream below it."""

    _stream: DataIterator

    def stats(self) -> str:
        return str(self._stream.stats())

    def schema(self) -> Schema | None:
        return self._stream.schema()

    def get_context(self) -> DataContext:
        return self._stream.get_context()


class CountedShard(_OverStream):
    """The shard of one rank. Its iterations are those of `stream`, in step with the other
    ranks'."""

    def __init__(self, stream: DataIterator, counter: EpochCounter, name: str) -> None:
        """Local shuffles without a seed take theirs from `name`."""
        self._stream, self._counter, self._name = stream, counter, name
        self._compared = False

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        return _Repeatable(self._rows)

    def world_size(self) -> int:
        """Number of shards."""
        return int(self._stream.world_size())

    def _to_ref_bundle_iterator(self) -> tuple[Iterator[RefBundle], Any, Any]:
        return self._stream._to_ref_bundle_iterator()  # type: ignore[no-any-return]

    def _iter_batches(self, **options: Any) -> Iterable[Any]:
        return _Repeatable(lambda: self._batches(**options))

    def _batches(
        self,
        *,
        batch_size: int | None = DEFAULT_BATCH,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        start = self._counter.begin()
        shuffles = local_shuffle_buffer_size is not None
        if shuffles and local_shuffle_seed is None:  # the same order after a restart
            local_shuffle_seed = zlib.crc32(f"{self._name}-{start.epoch}".encode())
        rest = self._rest(start, 0 if shuffles else start.rows)
        batches = rest._iter_batches(
            batch_size=batch_size,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            **options,
        )
        left_out = start.rows // batch_size if shuffles and batch_size else 0
        try:
            for number, batch in enumerate(batches):
                rows = batch_size or rest.block_rows.popleft()
                if number < left_out:
                    continue
                self._hand_out(start, rows)
                yield batch
        finally:
            self._counter.end(start.epoch)

    def _rows(self) -> Iterator[dict[str, Any]]:
        start = self._counter.begin()
        rest = self._rest(start, start.rows)
        try:
            for batch in rest._iter_batches(batch_size=None, batch_format=None):
                block = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch))
                for row in block.iter_rows(public_row_format=True):
                    self._hand_out(start, 1)
                    yield row
        finally:
            self._counter.end(start.epoch)

    def _rest(self, start: ShardPosition, left_out: int) -> _RestOfEpoch:
        see_block = partial(self._counter.see_block, start.epoch)
        return _RestOfEpoch(self._stream, left_out, see_block)

    def _hand_out(self, start: ShardPosition, rows: int) -> None:
        if not self._compared:
            self._compared = True
            if not self._counter.is_divided_as_before:
                _log.warning(
                    "rows of this epoch may be seen twice or not at all: the blocks of the dataset "
                    "are others than before the restart. Give override_num_blocks where it is read",
                    shard=self._name,
                    epoch=start.epoch,
                    rows_taken_before=start.rows,
                )
        self._counter.take(start.epoch, rows)


class _RestOfEpoch(_OverStream):
    """One iteration over `stream`, without its first rows."""

    def __init__(
        self, stream: DataIterator, left_out: int, see_block: Callable[[int], None]
    ) -> None:
        self._stream, self._left_out, self._see_block = stream, left_out, see_block
        self.block_rows: deque[int] = deque()
        """The numbers of rows of the blocks, in order: without a batch size each block is a
        batch."""

    def _get_dataset_tag(self) -> dict[str, str | None]:
        return self._stream._get_dataset_tag()  # type: ignore[no-any-return]

    def _on_iteration_end(self, executor: Any) -> None:
        self._stream._on_iteration_end(executor)

    def _to_ref_bundle_iterator(self) -> tuple[Iterator[RefBundle], Any, Any]:
        bundles, stats, executor = self._stream._to_ref_bundle_iterator()
        rest = without_first(self._seen(bundles), self._left_out)
        return self._kept(rest), stats, executor

    def _seen(self, bundles: Iterator[RefBundle]) -> Iterator[RefBundle]:
        for bundle in bundles:
            for rows in _block_rows(bundle):
                self._see_block(rows)
            yield bundle

    def _kept(self, bundles: Iterator[RefBundle]) -> Iterator[RefBundle]:
        for bundle in bundles:
            self.block_rows.extend(_block_rows(bundle))
            yield bundle


class _Repeatable:
    """An iterable over batches; each `iter` begins an iteration."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def without_first(bundles: Iterable[RefBundle], rows: int) -> Iterator[RefBundle]:
    """The bundles without their first `rows` rows. Bundles that are left out are not fetched."""
    for bundle in bundles:
        size = bundle.num_rows()
        if rows >= size:
            rows -= size
            continue
        yield _tail(bundle, rows) if rows else bundle
        rows = 0


def _block_rows(bundle: RefBundle) -> list[int]:
    """The sizes of the blocks that are not empty."""
    return [entry.metadata.num_rows for entry in bundle.blocks if entry.metadata.num_rows]


def _tail(bundle: RefBundle, rows: int) -> RefBundle:
    """The bundle without its first rows; of a divided block, the second part is a new object."""
    kept = []
    for entry in bundle.blocks:
        size = entry.metadata.num_rows
        if rows < size:
            kept.append(_tail_of_block(entry, rows) if rows else entry)
        rows = max(0, rows - size)
    return RefBundle(kept, owns_blocks=False, schema=bundle.schema)


def _tail_of_block(entry: BlockEntry, rows: int) -> BlockEntry:
    block = BlockAccessor.for_block(ray.get(entry.ref))
    tail = block.slice(rows, block.num_rows(), copy=True)
    return BlockEntry(ray.put(tail), BlockAccessor.for_block(tail).get_metadata())
