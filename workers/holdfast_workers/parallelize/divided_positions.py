"""Which positions of a sequence each rank has, and the way from that order to theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Consecutive positions, `first` to `last`, which a rank has at `begin` to `end` of its own."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def at(self) -> slice:
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class DividedPositions:
    """Each position is on exactly one rank. Runs of different ranks do not overlap."""

    by_rank: list[Tensor]
    """Positions of each rank, increasing."""
    runs: list[list[Run]]
    """The runs of positions, by rank."""
    order: Tensor
    """The indices that sort all ranks' positions, taken one rank after the other."""
    owners: Tensor
    """The inverse."""

    @classmethod
    def of(cls, by_rank: list[Tensor]) -> DividedPositions:
        every = torch.cat(by_rank)
        return cls(by_rank, [_runs(own) for own in by_rank], torch.argsort(every), every)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """`x` with the positions of `dim` in their order, from one rank's after the other's."""
        return x.index_select(dim, self.order.to(x.device))

    def by_owner(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `in_order`."""
        return x.index_select(dim, self.owners.to(x.device))


def _runs(positions: Tensor) -> list[Run]:
    breaks = (torch.nonzero(positions.diff() != 1).flatten() + 1).tolist()
    ends = [*breaks, len(positions)]
    return [
        Run(int(positions[begin]), int(positions[end - 1]), begin, end)
        for begin, end in zip([0, *breaks], ends, strict=True)
    ]
