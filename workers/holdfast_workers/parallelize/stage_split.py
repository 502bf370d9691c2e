"""Divides the layers of a model among the stages of a pipeline. Pure.

A stage is a run of neighbouring blocks; the first one has the embedding too, the last one the final
norm and the head. With several stages per rank, stages are dealt round the ranks, or along a V: the
first half downwards and the second half back, so that the first rank also has the last stage
(Qi et al. 2023, arXiv:2401.10241, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_workers.spec import ParallelSpec


@dataclass(frozen=True)
class StagePart:
    """The part of a model that a stage computes."""

    index: int
    first_block: int
    end_block: int
    is_first: bool
    is_last: bool

    @property
    def block_names(self) -> tuple[str, ...]:
        """Keys of the blocks in the model's `blocks`."""
        return tuple(str(block) for block in range(self.first_block, self.end_block))


def stages_of(parallel: ParallelSpec, pp: int, coordinate: int) -> tuple[int, ...]:
    """The stages of the ranks at `coordinate` of the axis `pp`, in their order. `pp`: its size."""
    count = pp * parallel.stages_on_a_rank
    if parallel.schedule == "zero_bubble":
        return (coordinate, count - 1 - coordinate)
    return tuple(range(coordinate, count, pp))


def split_stages(count: int, blocks: int, head: float) -> list[StagePart]:
    """All `count` stages of a pipeline. `head`: the work of the head, in blocks."""
    ends = balanced_ends(blocks, count, head)
    starts = [0, *ends[:-1]]
    return [
        StagePart(index, start, end, index == 0, index == count - 1)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def balanced_ends(blocks: int, stages: int, head: float) -> list[int]:
    """The end of each stage's run of blocks, so that the greatest work of a stage is least.

    There are two stages or more. `head`: the work of the head, which the last stage has too, in
    blocks. Every stage gets a block; among equally good divisions, the earlier stages get more.
    Raises ValueError if there are fewer blocks than stages.
    """
    if blocks < stages:
        raise ValueError(f"{blocks} blocks cannot be divided among {stages} stages")
    last = min(range(1, blocks - stages + 2), key=lambda n: _greatest(blocks, stages, head, n))
    others = blocks - last
    ends, end = [], 0
    for index in range(stages - 1):
        end += -(-(others - end) // (stages - 1 - index))
        ends.append(end)
    return [*ends, blocks]


def _greatest(blocks: int, stages: int, head: float, last: int) -> float:
    """The greatest work of a stage if the last one has `last` blocks and the others share the
    rest."""
    others = -(-(blocks - last) // (stages - 1))
    return max(float(others), last + head)
