"""The response models of lists: job rows, the cluster overview, the differences of specs.

They are cheap to build: a row comes from the job's own row in the store, never from its series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.job_model.times import Time
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.nodes import NodeView
from holdfast_service.views.view import View

_MISSING = object()


class JobRow(View):
    """A job in a list."""

    id: str
    name: str
    owner: str | None = Field(description="`labels.owner` of its spec; null: not set")
    state: State
    desired: Desired
    step: int | None = Field(description="null: a program has reported none")
    steps: int | None = Field(description="null: not known, of a user's program")
    attempt: int
    incidents: int
    loss: float | None
    tokens_per_second: float | None
    goodput: float | None = Field(description="as last updated; `/goodput` has the exact account")
    goodput_settled: bool = Field(
        default=False,
        description="the goodput says how the job trains; false: its start is still a large part "
        "of its time",
    )
    eta_s: float | None = Field(description="at the present pace; null: the job makes no steps")
    waiting: WaitingView | None
    outcome_code: str | None
    created_at: Time
    started_at: Time | None
    ended_at: Time | None
    event_seq: int


class QueuedJobView(View):
    """A job that is not on the cluster yet."""

    place: int = Field(description="its place in the queue, from 1")
    priority: int = Field(description="jobs with a higher one are before it")
    job: str
    name: str
    since: Time
    waiting: WaitingView | None = Field(description="null: no reconciler has handled it yet")


class ClusterCapacityView(View):
    """Capacity of the present and usable nodes that have CPUs or GPUs for ranks; free capacity is
    not requested by any job."""

    nodes: int
    cpus: float
    gpus: float
    free_nodes: int = Field(
        description="nodes without ranks that are not the standby of a job either"
    )
    free_cpus: float
    free_gpus: float


class ClusterView(View):
    nodes: tuple[NodeView, ...]
    queue: tuple[QueuedJobView, ...] = Field(description="in their order, 500 at most")
    queued: int = Field(description="jobs in the queue, including those not listed")
    capacity: ClusterCapacityView
    fault_injection: bool = Field(description="whether this server lets users inject faults")


class SpecDifferenceView(View):
    path: str = Field(description="dotted, as in the errors of a spec")
    left: Any = Field(description="value in this job; null: not set")
    right: Any = Field(description="value in the other job; null: not set")


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[SpecDifferenceView]:
    """The differing paths in the order of `left`; paths only in `right` come last. Lists are
    compared as a whole."""
    return list(_between(left, right, ""))


def _between(left: Any, right: Any, path: str) -> Iterator[SpecDifferenceView]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys([*left, *right]):
            below = f"{path}.{key}" if path else str(key)
            yield from _between(left.get(key, _MISSING), right.get(key, _MISSING), below)
    elif left != right:
        yield SpecDifferenceView(path=path, left=_json_value(left), right=_json_value(right))


def _json_value(value: Any) -> Any:
    return None if value is _MISSING else value
