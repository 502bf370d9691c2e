"""The ranks' own process group for `report`, `barrier` and broadcasts, on gloo.

Apart from the group with which the function trains, so that a `report` from another thread, or
beside a collective that still runs, cannot meet the function's collectives.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankGroup:
    """All ranks. Each call is made by every rank, in the same order; it raises the errors of
    `torch.distributed` if a rank is gone."""

    def __init__(self, timeout_s: float) -> None:
        """The default process group must exist."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Serves as a barrier."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # every place is filled now

    def from_rank_zero(self, value: T) -> T:
        """The value of rank 0."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather(None)
