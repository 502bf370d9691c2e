"""The response models of a replay's comparison with the job that it replays."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from holdfast_service.views.view import View


class ReplayResult(StrEnum):
    """The result of a comparison."""

    RUNNING = "running"
    """Equal so far; further steps will come."""
    EQUAL = "equal"
    DIFFERENT = "different"
    DISTURBED = "disturbed"
    """The replay, or the job since then, computed a step on another mesh: run it again."""
    INCOMPLETE = "incomplete"
    """The replay has ended before its last step, or nothing could be compared."""


class StepDifferenceView(View):
    step: int
    original: str = Field(description="digest of the replayed job")
    replay: str = Field(description="digest of the replay")


class MeshSpanView(View):
    """The mesh of the steps after `after_step`, up to the next span."""

    after_step: int
    mesh: dict[str, int] = Field(description="size of each axis of more than one rank")
    ranks: int


class ComparisonView(View):
    """The digests of a replay and of the job that it replays, step by step."""

    original: str = Field(description="id of the replayed job")
    replay: str = Field(description="id of the replay")
    result: ReplayResult = Field(
        description="`different` and `disturbed` are final. running: equal so far; incomplete: the "
        "replay ended too early; disturbed: the meshes differ after `same_meshes_until`, run it "
        "again"
    )
    until_step: int = Field(description="the last step that is compared")
    reached_step: int = Field(description="the last of these steps that the replay has computed")
    to_come: int = Field(description="steps that the replay has still to compute")
    last_step: int = Field(description="this answer covers the steps up to this one")
    next_cursor: str | None = Field(
        description="`cursor` of the following steps; null: no further step can be compared"
    )
    compared: int = Field(description="steps of this answer with a digest in both runs")
    equal: int
    one_sided: int = Field(
        description="steps of this answer with a digest in only one run: a fault may prevent a "
        "digest from being reported"
    )
    first_difference: StepDifferenceView | None
    meshes: tuple[MeshSpanView, ...] = Field(description="meshes of the replayed job")
    same_meshes_until: int = Field(
        description="the last computed step up to which both runs have the same meshes"
    )


def joined(before: ComparisonView, following: ComparisonView) -> ComparisonView:
    """Both parts of a comparison in one; `following` covers the steps after `before`."""
    result = following.result
    if before.result in (ReplayResult.DIFFERENT, ReplayResult.DISTURBED):
        result = before.result
    if result is ReplayResult.EQUAL and not before.compared + following.compared:
        result = ReplayResult.INCOMPLETE
    return following.model_copy(
        update={
            "result": result,
            "compared": before.compared + following.compared,
            "equal": before.equal + following.equal,
            "one_sided": before.one_sided + following.one_sided,
            "first_difference": before.first_difference or following.first_difference,
        }
    )
