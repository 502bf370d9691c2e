"""Where each rank stands in its shards of Ray datasets. Pure, apart from the file beside a
checkpoint.

An epoch of a shard is one iteration over it. A position counts the rows that the function has
taken from the present epoch, so it is true whatever is fetched ahead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.integrations.ray_train.errors import StorageUnusable

FILE_NAME = ".holdfast-shards.json"
"""In the folder of a checkpoint: the positions of all ranks at its report."""


@dataclass(frozen=True)
class ShardPosition:
    """Of one rank in one dataset. `epoch` counts from 0; `rows`: those of it that were taken."""

    epoch: int = 0
    rows: int = 0


@dataclass(frozen=True)
class ShardStart:
    """Where the ranks begin, by rank. `repeated`: how many rows of the first epoch are seen again,
    because the number of ranks has changed."""

    positions: tuple[ShardPosition, ...]
    repeated: int = 0

    @property
    def epoch(self) -> int:
        """The same on all ranks: they go through each epoch together."""
        return self.positions[0].epoch


class EpochCounter:
    """Counts what one rank takes from one shard."""

    def __init__(self, start: ShardPosition) -> None:
        self.position = start
        self._runs = False

    def begin(self) -> ShardPosition:
        """Begin an iteration: its epoch, and how many of its rows were taken before the
        checkpoint. One that still runs ends."""
        if self._runs:
            self.end(self.position.epoch)
        self._runs = True
        return self.position

    def take(self, epoch: int, rows: int) -> None:
        """Rows of the iteration of this epoch are handed to the function."""
        if self._is_at(epoch):
            self.position = ShardPosition(epoch, self.position.rows + rows)

    def end(self, epoch: int) -> None:
        """That iteration is complete, or the function has left it: the next is the next epoch."""
        if self._is_at(epoch):
            self.position, self._runs = ShardPosition(epoch + 1), False

    def _is_at(self, epoch: int) -> bool:
        return self._runs and epoch == self.position.epoch


def start_of(stored: Sequence[ShardPosition], ranks: int) -> ShardStart:
    """Where `ranks` ranks begin after a checkpoint with these positions, by rank; () none.

    Shards depend on the number of ranks, so after a change the epoch is begun again. A rank that
    had not left an epoch that another rank had left begins the next one with it.
    """
    epoch = max((each.epoch for each in stored), default=0)
    taken = [each.rows if each.epoch == epoch else 0 for each in stored]
    if len(stored) == ranks:
        return ShardStart(tuple(ShardPosition(epoch, rows) for rows in taken))
    return ShardStart((ShardPosition(epoch),) * ranks, sum(taken))


def encode(by_rank: Sequence[Mapping[str, ShardPosition]]) -> str:
    """The text of the file. `by_rank`: the position in each dataset, of every rank."""
    names = sorted({name for positions in by_rank for name in positions})
    found = {name: [each.get(name, ShardPosition()) for each in by_rank] for name in names}
    shards = {name: [[at.epoch, at.rows] for at in each] for name, each in found.items()}
    return json.dumps({"version": 1, "shards": shards})


def read(folder: Path) -> dict[str, tuple[ShardPosition, ...]]:
    """The positions by dataset and rank, as the checkpoint in `folder` has them; {}: it has none.
    Raises StorageUnusable if they are damaged."""
    path = folder / FILE_NAME
    try:
        shards = json.loads(path.read_text())["shards"]
        return {
            name: tuple(ShardPosition(int(epoch), int(rows)) for epoch, rows in positions)
            for name, positions in shards.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageUnusable(
            f"{path} cannot be read ({error}): remove it, and the datasets begin at their first "
            "epoch, or remove the checkpoint"
        ) from error
