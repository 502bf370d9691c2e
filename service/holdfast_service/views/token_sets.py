"""The response models of the preparation of data, and of its samples as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.preparation import (
    PreparePhase,
    SourceProgress,
    refusals,
    wait_text,
)
from holdfast_service.views.view import View
from holdfast_workers.spec import amount_text


class SourceProgressView(View):
    """How far a source is."""

    path: str
    phase: PreparePhase
    files: int = Field(description="found so far")
    total_bytes: int
    done_bytes: int = Field(description="of the source that are tokens, from earlier tries too")
    tokens: int = Field(description="so far")
    expected_tokens: int | None = Field(description="of the whole source; null: not known yet")
    documents: int = Field(description="so far")
    held_out_tokens: int = Field(description="beside `tokens`: kept from training, for validation")
    left_s: float | None = Field(description="at the present pace; null: not known yet")
    waits: str = Field(description="what it waits for at present")
    bad_count: int = Field(description="records that are left out")
    bad: tuple[str, ...] = Field(description="the first of them: file, row and why")
    error: str = Field(description="why the source is refused")


class DataPreparationView(View):
    """How far the sources of a spec are."""

    done: bool = Field(description="every source is ready, or one is refused")
    ready: bool = Field(description="every source is ready, and the spec fits them")
    text: str = Field(description="in a sentence; if a job of the spec would be refused, why")
    sources: tuple[SourceProgressView, ...]
    validation: SourceProgressView | None = Field(
        description="files of their own for validation; null: the spec names none"
    )
    data: dict[str, Any] | None = Field(
        description="the section `data` with the token sets; null: not all are ready"
    )
    steps: int | None = Field(
        description="that `train` comes to; null: not known before every source is ready"
    )

    @classmethod
    def of(
        cls,
        progress: Sequence[SourceProgress],
        spec: JobSpec,
        ready: JobSpec | None,
        unfit: str,
    ) -> DataPreparationView:
        """`progress`: of the sources of `spec`, and of its files for validation; `ready`: the spec
        with the token sets, once all are there; `unfit`: why a job of it could not train on them,
        or ""."""
        refused, sources = refusals(progress), len(spec.data.sources)
        views = [SourceProgressView.from_attributes(each) for each in progress]
        return cls(
            done=bool(refused) or ready is not None,
            ready=ready is not None and not unfit,
            text=refused or unfit or (wait_text(progress) if ready is None else _ready_text(ready)),
            sources=tuple(views[:sources]),
            validation=views[sources] if len(views) > sources else None,
            data=None if ready is None else ready.data.model_dump(mode="json"),
            steps=(ready or spec).train.steps,
        )


def _ready_text(spec: JobSpec) -> str:
    tokens = sum(each.tokens for each in spec.data.prepared)
    text = f"{tokens:,} token{'' if tokens == 1 else 's'}"
    amount, steps = amount_text(spec.train), spec.train.steps
    return f"{text}; {amount} comes to {steps:,} steps" if amount and steps else text


class SampleView(View):
    """A sample as the model will see it."""

    position: int = Field(description="in the order of training, from 0")
    source: str = Field(description="path of its source")
    tokens: int
    text: str


class DataSamplesView(View):
    samples: tuple[SampleView, ...]
