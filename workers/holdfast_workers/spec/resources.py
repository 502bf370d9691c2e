"""What a job's ranks have on its nodes, and the deadlines of its parts, for large models or slow
storage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast_workers.spec.fields import Positive, Section

Seconds = Annotated[float, Field(ge=5, le=86400)]


class RankResources(Section):
    """What ranks have on each node: the part of the section `resources` that the nodes need."""

    workers_per_node: Positive = Field(default=1, description="Ranks that run on each node.")
    threads_per_worker: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1,
        description="Threads with which torch computes in each worker, on every node: another "
        "number may give other bits.",
    )
    gpus_per_worker: Annotated[float, Field(ge=0)] = Field(
        default=0, description="GPUs that each worker reserves: 0 or 1."
    )


class TimeoutsSpec(Section):
    """How long parts of a job may take; a longer one counts as a fault, in seconds."""

    install_s: Seconds = Field(
        default=600,
        description="For installing the packages of `runtime_env` on a node, in addition to "
        "`start_s`.",
    )
    start_s: Seconds = Field(
        default=120,
        description="From the placement of the job until its nodes are ready: imports, users' "
        "code, data, the check of the node.",
    )
    form_s: Seconds = Field(
        default=120,
        description="From an attempt's order until all ranks have met, built the model and taken "
        "their state from memory.",
    )
    load_s: Seconds | None = Field(
        default=None,
        description="For a rank's state from the remote tier, or its published weights, in "
        "addition to `form_s`. null: as long as `form_s` and the limits of `detection` allow.",
    )
    first_step_s: Seconds = Field(
        default=900,
        description="From then until the first step, with its compilation.",
    )
    save_s: Seconds = Field(
        default=120,
        description="For saving a rank's shard to the remote tier, in addition to 0.1 s per MB.",
    )
    publish_s: Seconds = Field(
        default=110,
        description="For publishing a checkpoint whose shards are saved.",
    )
    finish_s: Seconds = Field(
        default=300,
        description="From the last step until its checkpoint is in the remote tier.",
    )
