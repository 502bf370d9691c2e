"""The part of the section `resources` that the nodes of a job need."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast_workers.spec.fields import Positive, Section


class RankResources(Section):
    """What ranks have on each node."""

    workers_per_node: Positive = Field(default=1, description="Ranks that run on each node.")
    threads_per_worker: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1,
        description="Threads with which torch computes in each worker, on every node: another "
        "number may give other bits.",
    )
    gpus_per_worker: Annotated[float, Field(ge=0)] = Field(
        default=0, description="GPUs that each worker reserves: 0 or 1."
    )
