"""What lists show: rows of jobs, the cluster at a glance, a spec before it is submitted.

Made to be cheap: a row is read from the job's own row in the store, never from its series.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.views.jobs import NodeView, View, WaitingView


class JobRow(View):
    """A job as one line of a list."""

    id: str
    name: str
    owner: str | None = Field(description="`labels.owner` of its spec; null: it names none")
    state: State
    desired: Desired
    step: int
    steps: int
    attempt: int
    incidents: int
    loss: float | None
    tokens_per_second: float | None
    goodput: float | None = Field(description="as last counted; `/goodput` has the exact account")
    eta_s: float | None = Field(description="at the present pace; null: it makes no steps")
    waiting: WaitingView | None
    outcome_code: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    event_seq: int


class JobRowPage(View):
    rows: tuple[JobRow, ...]
    next_cursor: str | None = Field(description="null: no more")
    total: int = Field(description="jobs that the filters let through, on all pages")
    counts: dict[State, int] = Field(
        description="the same by state, as if no state had been asked for; states without a job "
        "are left out"
    )


class QueuedJobView(View):
    """A job that is not on the cluster yet."""

    job: str
    name: str
    since: float
    waiting: WaitingView | None = Field(description="null: nobody has looked at it yet")


class ClusterCapacityView(View):
    """Of the nodes that are there and not set aside; free is what no job has asked for."""

    nodes: int
    cpus: float
    gpus: float
    free_nodes: int = Field(description="on which no job has a rank or a standby")
    free_cpus: float
    free_gpus: float


class ClusterView(View):
    nodes: tuple[NodeView, ...]
    queue: tuple[QueuedJobView, ...] = Field(description="oldest first, 500 at most")
    queued: int = Field(description="jobs in the queue, also those not listed")
    capacity: ClusterCapacityView
    fault_injection: bool = Field(description="whether this server lets users inject faults")


class ValidSpecView(View):
    spec: dict[str, Any] = Field(description="the resolved spec, defaults filled in")


class SpecDifferenceView(View):
    path: str = Field(description="dotted, as in the faults of a spec")
    left: Any = Field(description="of the job asked about; null: it does not have it")
    right: Any = Field(description="of the other job")
