"""The section `checkpoint`: when the state is saved to memory and to the remote tier, and what
is kept there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.spec.fields import (
    Endpoint,
    Every,
    NonNegative,
    Positive,
    Reference,
    Region,
    Section,
)

FIRST_MEMORY_STEPS = 2
FIRST_REMOTE_STEPS = 20
"""The initial intervals of `auto`, so that steps with and without a save can soon be compared."""


class MemoryTierSpec(Section):
    every_steps: Every = Field(
        default=1,
        description="Steps between two saves to memory. 0: the memory tier is off. auto: Holdfast "
        "measures the best interval.",
    )
    copies: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1,
        description="Copies of each shard in the memory of other nodes. 0: only in the memory of "
        "its own node.",
    )

    @property
    def partner_copies(self) -> int:
        """Number of copies on other nodes; 0 if the tier is off."""
        return self.copies if self.every_steps else 0


class KeepBestSpec(Section):
    """How the best checkpoints are chosen: by a metric of the step."""

    metric: Literal["loss", "grad_norm", "eval_loss", "eval_perplexity"] = Field(
        default="loss",
        description="`eval_loss` and `eval_perplexity` are those of `evaluate`, or metrics that a "
        "function gives to its steps.",
    )
    mode: Literal["min", "max"] = "min"
    n: Positive = Field(default=1, description="Number of best checkpoints that are kept.")


class RemoteTierSpec(Section):
    uri: Reference | None = Field(
        default=None,
        description="Location of the remote tier: a path, file:///path or s3://bucket/prefix. "
        "null: in the server's store.",
    )
    endpoint: Endpoint = None
    region: Region = None
    secret: Reference | None = Field(
        default=None,
        description="Name of the server's secret with the credentials for this bucket and "
        "endpoint. null: the variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ... in the "
        "environment of the server and of all nodes.",
    )
    every_steps: Every = Field(
        default=100,
        description="Steps between two saves to the remote tier. 0: only the last step is saved. "
        "auto: Holdfast measures the best interval.",
    )
    keep: Positive = Field(default=3, description="Number of newest checkpoints that are kept.")
    keep_every: Positive | None = Field(
        default=None,
        description="Checkpoints whose step is a multiple of this number are kept for good.",
    )
    keep_best: KeepBestSpec | None = Field(
        default=None, description="The best checkpoints by a metric are kept in addition."
    )


class CheckpointSpec(Section):
    memory: MemoryTierSpec = MemoryTierSpec()
    remote: RemoteTierSpec = RemoteTierSpec()
    final_save_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="Seconds that the last state of a cancelled or paused job may take to reach "
        "the remote tier. 0: no final save; the newest checkpoint there is used. A program has "
        "at least twice `program.grace_s` and 10 s.",
    )
    overhead_target: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.01,
        description="Fraction of the training time that a tier with `every_steps: auto` may cost.",
    )
    digest_every_steps: NonNegative = Field(
        default=1,
        description="Steps between two digests of the whole state, which prove that a recovered "
        "run equals an undisturbed one (P2). 0: no digests.",
    )

    @property
    def first_intervals(self) -> tuple[int, int]:
        """Steps between two saves to memory, and to the remote tier, when training starts."""
        memory, remote = self.memory.every_steps, self.remote.every_steps
        return (
            FIRST_MEMORY_STEPS if memory == "auto" else memory,
            FIRST_REMOTE_STEPS if remote == "auto" else remote,
        )
