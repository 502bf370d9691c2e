"""The response models of checkpoints in storage and in memory."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.views.view import View


class CheckpointView(View):
    """A checkpoint of the remote tier; deleted and bad checkpoints stay listed."""

    step: int
    attempt: int
    tier: str
    uri: str
    nbytes: int
    mesh: dict[str, int]
    metrics: dict[str, float] = Field(description="metrics of its step, as far as known")
    saved_at: Time
    verified_at: Time | None = Field(description="when all bytes were last verified")
    deleted_at: Time | None
    deleted_why: str | None
    bad: str | None = Field(description="the verification error, if any")
    best: bool = Field(description="kept as a best checkpoint by `checkpoint.remote.keep_best`")
    pinned: bool | None = Field(description="null: the storage did not answer")
    needed_by: tuple[str, ...] | None = Field(
        description="jobs that start from it and have no own checkpoint yet; null: as above"
    )


class MemoryTierView(View):
    protected_step: int | None = Field(
        description="newest step whose state is also held by every rank's partner; null: none, or "
        "the job has ended"
    )
