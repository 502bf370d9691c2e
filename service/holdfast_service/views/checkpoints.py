"""The response models of checkpoints in storage and in memory."""

from __future__ import annotations

from pydantic import Field

from holdfast_service.job_model.times import Time
from holdfast_service.placement.memory_protection import MemoryProtection
from holdfast_service.views.view import View
from holdfast_service.wording import plural


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
        description="newest step whose state every rank has in memory, and its partners too, if "
        "it has any; null: none, or the job has ended"
    )
    where: str = Field(description="where the states in memory are, and what they outlive")


def memory_place(step: int | None, memory: MemoryProtection | None, *, ended: bool) -> str:
    """The sentence of `where`. `step`: see `protected_step`; `memory`: where the copies of the
    present attempt are; None: it has saved nothing."""
    if ended:
        return "none: they end with the job"
    if memory is None:
        none_yet = "nothing was saved in this attempt so far"
        return none_yet if step is None else "of an earlier attempt"
    if memory.copies:
        if step is None:
            return "no step has its copies on other nodes yet"
        return f"{plural(memory.copies, 'copy', 'copies')} on other nodes"
    if any(odd.probability > 0 for odd in memory.recoverable.values()):
        return "some ranks have no copy on another node"
    return "on the node of each rank only: it outlives processes, not the node"
