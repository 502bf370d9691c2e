"""The response models of operations."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from holdfast_service.job_model.operations import (
    ExportedWeights,
    OperationKind,
    OperationState,
    ParameterNames,
)
from holdfast_service.job_model.times import Time
from holdfast_service.views.pages import Page
from holdfast_service.views.view import View


class ContentView(View):
    """The file that an operation has made: `GET /operations/{id}/content`."""

    name: str
    nbytes: int
    digest: str = Field(description="its `ETag`: the same for each export of the same tensors")
    note: str | None = Field(
        default=None,
        description="what to know of it, such as why a folder has no tokenizer; null: nothing",
    )


class OperationView(View):
    """Long work that was requested. Its server may end or die: another one starts it again."""

    id: str
    kind: OperationKind
    job_id: str
    step: int = Field(description="of the checkpoint")
    names: ParameterNames | None = Field(
        description="for an export: the names of the parameters; null: no export"
    )
    weights: ExportedWeights | None = Field(
        description="for an export: which weights it has; null: no export"
    )
    state: OperationState
    created_at: Time
    started_at: Time | None = Field(description="when a server last began with it")
    ended_at: Time | None
    expires_at: Time | None = Field(
        description="when the operation and its file are removed; null: not before it has ended"
    )
    done_bytes: int = Field(description="of the checkpoint, read since `started_at`")
    total_bytes: int | None = Field(description="to read; null: not known yet")
    bad: str | None = Field(
        description="for a verification: what differs from what was saved; null: nothing so far"
    )
    content: ContentView | None = Field(description="for an export that succeeded: its file")
    error: dict[str, Any] | None = Field(
        description="why it failed, as a problem document with `code`, `status` and `detail`"
    )


class OperationPage(Page):
    items: tuple[OperationView, ...] = Field(description="newest first")
