"""The section `parallel`: the sizes of the mesh axes, and how they divide the work."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from holdfast_workers.spec.fields import Positive, Section

Zero = Literal[1, 2, 3]
ContextMethod = Literal["all_gather", "ring", "ulysses"]
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Fields of `parallel` that are sizes of the mesh, outermost first."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class ParallelSpec(Section):
    """Sizes of the mesh axes, outermost first; the world size is their product."""

    pp: Positive = Field(default=1, description="Number of groups of ranks that divide the layers.")
    dp_replicate: Positive = Field(
        default=1,
        description="Number of replicas of the whole state. The data is divided among them.",
    )
    dp_shard: Positive = 1
    cp: Positive = Field(default=1, description="Number of ranks that divide each sequence.")
    tp: Positive = 1
    zero: Zero | None = Field(
        default=None,
        description="What the ranks of `dp_shard` hold in pieces during a step (ZeRO). 1: only the "
        "optimizer's state. 2: gradients too, from each micro-batch on. 3: parameters too, but for "
        "the block that computes. null: 1, and for models above 64 MiB with parameters as in 3 "
        "until the backward pass. Between steps everything is in pieces.",
    )

    context_method: ContextMethod = Field(
        default="all_gather",
        description="How the ranks of `cp` attend to each other's positions. all_gather: each "
        "gathers all keys and values; good with few key and value heads. ring: these go round in "
        "blocks, so that no rank has all of them; for the longest sequences. ulysses: each rank "
        "gets all positions of some heads; sends least with many key and value heads, whose number "
        "must be a multiple of `cp`.",
    )
    schedule: Schedule = Field(
        default="1f1b",
        description="The order of a pipeline's micro-batches. gpipe: all forward passes first. "
        "1f1b: forward and backward in turns, which keeps fewer activations. interleaved: 1f1b "
        "with several stages per rank, which waits less. zero_bubble: two stages per rank, along "
        "a V, and the gradients of weights are computed where a rank would wait (ZBV).",
    )
    stages_per_rank: Positive | None = Field(
        default=None,
        description="Number of stages of each rank of `pp`. null: 2 for interleaved and "
        "zero_bubble, else 1.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether `tp` divides the sequence where it does not divide the layers: the "
        "residual stream, its norms and dropout.",
    )
    vocabulary_parallel: bool = Field(
        default=False,
        description="Whether `tp` divides embedding, head and the loss, by parts of the "
        "vocabulary.",
    )

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes; `pp`, `dp_replicate` and `cp` are axes only if they divide something."""
        sizes: dict[str, int] = {axis: getattr(self, axis) for axis in MESH_AXES}
        return {axis: n for axis, n in sizes.items() if n > 1 or axis in ("dp_shard", "tp")}

    def why_no_schedule(self, micro_batches: int, pp: int | None = None) -> str:
        """Why `schedule` cannot order so many micro-batches of a step and data-parallel rank on
        `pp` stages, or those of the spec; "" if it can."""
        stages = pp or self.pp
        rounds = max(1, micro_batches // stages)
        if stages == 1 or self.schedule != "interleaved" or micro_batches % rounds == 0:
            return ""
        return (
            f"schedule interleaved wants micro-batches in equal rounds of about {stages}, and each "
            f"data-parallel rank has {micro_batches}: use {micro_batches // stages * stages} or "
            f"{-(-micro_batches // stages) * stages}, or another schedule"
        )

    @property
    def stages_on_a_rank(self) -> int:
        """`stages_per_rank`, or its default."""
        several = self.schedule in ("interleaved", "zero_bubble")
        return self.stages_per_rank or (2 if several else 1)

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or groups of ranks, that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def product(self) -> str:
        """The world as a product, for messages."""
        return f"{' × '.join(self.mesh)} = {' × '.join(str(size) for size in self.mesh.values())}"
