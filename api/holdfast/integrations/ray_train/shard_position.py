"""Where each rank stands in its shards of Ray datasets. Pure, apart from the file beside a
checkpoint.

An epoch of a shard is one iteration over it. A position counts the rows that the function has
taken from the present epoch, so it is true whatever is fetched ahead.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.integrations.ray_train.errors import StorageUnusable

FILE_NAME = ".holdfast-shards.json"
"""The file in the folder of a checkpoint with the positions of all ranks at its report."""


@dataclass(frozen=True)
class ShardPosition:
    """The position of one rank in one dataset. `epoch` counts from 0; `rows` is the number of its
    rows that were taken. `blocks` is their `fingerprint`, which shows after a restart whether the
    blocks are divided as before."""

    epoch: int = 0
    rows: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class ShardStart:
    """The positions at which the ranks begin, by rank. `repeated` is the number of rows of the
    first epoch that are seen again because the number of ranks has changed."""

    positions: tuple[ShardPosition, ...]
    repeated: int = 0

    @property
    def epoch(self) -> int:
        """The present epoch, the same on all ranks: they go through each epoch together."""
        return self.positions[0].epoch


class EpochCounter:
    """Counts what one rank takes from one shard."""

    def __init__(self, start: ShardPosition) -> None:
        self._start, self._at = start, start
        self._runs = False
        self._block_rows: list[int] = []

    @property
    def position(self) -> ShardPosition:
        """The present position, with the fingerprint of the blocks whose rows were taken."""
        if not self._at.rows:
            return self._at
        return replace(self._at, blocks=fingerprint(self._block_rows, self._at.rows))

    @property
    def is_divided_as_before(self) -> bool:
        """Whether the epoch that runs has the same blocks as before the checkpoint, as far as its
        rows were taken then; known once the first row behind them has come."""
        before = self._start
        is_same_epoch = self._runs and self._at.epoch == before.epoch
        if not (is_same_epoch and before.rows):
            return True
        return fingerprint(self._block_rows, before.rows) == before.blocks

    def see_block(self, epoch: int, rows: int) -> None:
        """The next block of the iteration of this epoch has come, before its rows are taken."""
        if self._is_at(epoch):
            self._block_rows.append(rows)

    def begin(self) -> ShardPosition:
        """Begin an iteration: its epoch, and how many of its rows were taken before the
        checkpoint. One that still runs ends."""
        if self._runs:
            self.end(self._at.epoch)
        self._runs, self._block_rows = True, []
        return self._at

    def take(self, epoch: int, rows: int) -> None:
        """Rows of the iteration of this epoch are handed to the function."""
        if self._is_at(epoch):
            self._at = ShardPosition(epoch, self._at.rows + rows)

    def end(self, epoch: int) -> None:
        """Note that the iteration is complete or the function has left it: the next iteration is
        the next epoch."""
        if self._is_at(epoch):
            self._at, self._runs = ShardPosition(epoch + 1), False

    def _is_at(self, epoch: int) -> bool:
        return self._runs and epoch == self._at.epoch


def fingerprint(block_rows: Sequence[int], rows: int) -> int:
    """A hash of the sizes of the leading blocks that have no more than `rows` rows together."""
    found, total = 0, 0
    for size in block_rows:
        total += size
        if total > rows:
            break
        found = zlib.crc32(str(size).encode(), found)
    return found


def start_of(stored: Sequence[ShardPosition], ranks: int) -> ShardStart:
    """The positions at which `ranks` ranks begin after a checkpoint with the positions `stored`, by
    rank; () if there were none.

    Shards depend on the number of ranks, so after a change the epoch is begun again. A rank that
    had not left an epoch that another rank had left begins the next one with it.
    """
    epoch = max((each.epoch for each in stored), default=0)
    here = tuple(each if each.epoch == epoch else ShardPosition(epoch) for each in stored)
    if len(stored) == ranks:
        return ShardStart(here)
    return ShardStart((ShardPosition(epoch),) * ranks, sum(each.rows for each in here))


def encode(by_rank: Sequence[Mapping[str, ShardPosition]]) -> str:
    """The text of the file. `by_rank`: the position in each dataset, of every rank."""
    names = sorted({name for positions in by_rank for name in positions})
    found = {name: [each.get(name, ShardPosition()) for each in by_rank] for name in names}
    shards = {name: [[at.epoch, at.rows, at.blocks] for at in each] for name, each in found.items()}
    return json.dumps({"version": 1, "shards": shards})


def read(folder: Path) -> dict[str, tuple[ShardPosition, ...]]:
    """The positions by dataset and rank, as the checkpoint in `folder` has them; {}: it has none.
    Raises StorageUnusable if they are damaged."""
    path = folder / FILE_NAME
    try:
        shards = json.loads(path.read_text())["shards"]
        return {
            name: tuple(ShardPosition(*map(int, position)) for position in positions)
            for name, positions in shards.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageUnusable(
            f"{path} cannot be read ({error}): remove it, and the datasets begin at their first "
            "epoch, or remove the checkpoint"
        ) from error
