"""The answers of lists: a page has `items`, and the `cursor` of the page after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import Field

from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.attempts import AttemptView
from holdfast_service.views.checkpoints import CheckpointView, MemoryTierView
from holdfast_service.views.history import (
    DigestView,
    DiscardedView,
    EventView,
    LogLineView,
    MetricPoint,
)
from holdfast_service.views.incidents import FaultView, IncidentView
from holdfast_service.views.jobs import CancelledJobView
from holdfast_service.views.lists import JobRow, SpecDifferenceView
from holdfast_service.views.nodes import NodeView
from holdfast_service.views.view import View


class Numbered(Protocol):
    @property
    def number(self) -> int: ...


class Page(View):
    next_cursor: str | None = Field(
        default=None, description="`cursor` of the next page; null: there are no further items"
    )


def next_number(found: Sequence[Numbered], limit: int) -> str | None:
    """The cursor after the first `limit` items of `found`, if there are more than these."""
    return str(found[limit - 1].number) if len(found) > limit else None


class JobPage(Page):
    items: tuple[JobRow, ...]
    total: int = Field(description="number of jobs that match the filters, on all pages")
    counts: dict[State, int] = Field(
        description="the same by state, without the state filter; states without a job are left out"
    )


class CancelledJobPage(Page):
    """Jobs that a call has cancelled. `next_cursor` not null: repeat the call with it."""

    items: tuple[CancelledJobView, ...]


class AttemptPage(Page):
    items: tuple[AttemptView, ...] = Field(description="oldest first")


class IncidentPage(Page):
    items: tuple[IncidentView, ...] = Field(description="oldest first")


class FaultPage(Page):
    items: tuple[FaultView, ...] = Field(description="oldest first")


class CheckpointPage(Page):
    """The saved states from which a job can continue. `items`: those of the remote tier."""

    items: tuple[CheckpointView, ...] = Field(description="newest step first")
    memory: MemoryTierView
    storage_problem: str | None = Field(description="why the storage did not answer, if so")


class SpecDifferencePage(Page):
    items: tuple[SpecDifferenceView, ...]


class NodePage(Page):
    items: tuple[NodeView, ...] = Field(
        description="all nodes ever seen; nodes in the cluster first"
    )


class EventPage(Page):
    items: tuple[EventView, ...] = Field(description="ascending by number")
    last_seq: int = Field(
        description="pass it as `after` for later events; equals `after` if there are no events"
    )
    state: State = Field(description="the job's state when these events were read")
    ended: bool = Field(description="the job has ended and all its events were returned")


class LogPage(Page):
    """`items` may be empty although there are further ones: a search has a time limit."""

    items: tuple[LogLineView, ...] = Field(description="ascending by number")
    last_line: int = Field(description="pass it as `after` for later lines")
    first_line: int | None = Field(
        default=None,
        description="when reading backwards: pass it as `before` to continue; null: no more",
    )
    ended: bool = Field(
        default=False, description="the job has ended and these are its last matching lines"
    )


class MetricPage(Page):
    items: tuple[MetricPoint, ...] = Field(description="ascending by step, one per step")
    names: tuple[str, ...]
    last_step: int = Field(description="pass it as `after_step` for later steps")
    discarded: tuple[DiscardedView, ...] = Field(
        default=(), description="on request: the steps that are not part of history, by attempt"
    )


class DigestPage(Page):
    items: tuple[DigestView, ...] = Field(description="ascending by step")
