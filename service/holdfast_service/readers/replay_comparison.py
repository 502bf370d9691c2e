"""Compares the digests of a replay with those of the job that it replays. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_service.job_model.mesh_history import MeshSpan, same_until, until
from holdfast_service.job_model.replay import ReplayMark
from holdfast_service.views.comparison import (
    ComparisonView,
    MeshSpanView,
    ReplayResult,
    StepDifferenceView,
)


@dataclass(frozen=True)
class ReplayedRun:
    """One of the two runs: its mesh history, and its digests of the steps that are compared."""

    meshes: Sequence[MeshSpan]
    digests: Mapping[int, str]


@dataclass(frozen=True)
class ReplayProgress:
    """The replay at the moment of the comparison."""

    job: str
    reached_step: int
    """The last step that it has computed, at most the last one that is compared."""
    has_ended: bool


def compare(
    mark: ReplayMark,
    progress: ReplayProgress,
    original: ReplayedRun,
    replay: ReplayedRun,
    steps: range,
) -> ComparisonView:
    """The comparison of the digests of `steps`, as far as they are computed.

    From the first step that has another mesh in the replay, nothing can be compared.
    """
    reached = progress.reached_step
    comparable = same_until(original.meshes, replay.meshes, reached)
    last = max(steps.start - 1, min(steps.stop - 1, comparable))
    covered = range(steps.start, last + 1)
    ours = {step for step in covered if step in original.digests}
    theirs = {step for step in covered if step in replay.digests}
    both = sorted(ours & theirs)
    unequal = [step for step in both if original.digests[step] != replay.digests[step]]
    first = None
    if unequal:
        step = unequal[0]
        first = StepDifferenceView(
            step=step, original=original.digests[step], replay=replay.digests[step]
        )
    more = last < comparable
    return ComparisonView(
        original=mark.original,
        replay=progress.job,
        result=_result(
            mark,
            progress,
            comparable,
            more=more,
            nothing=steps.start == 1 and not both,
            first=first,
        ),
        until_step=mark.until_step,
        reached_step=reached,
        to_come=mark.until_step - reached,
        last_step=last,
        next_cursor=str(last) if more else None,
        compared=len(both),
        equal=len(both) - len(unequal),
        one_sided=len(ours ^ theirs),
        first_difference=first,
        meshes=tuple(
            MeshSpanView(after_step=span.after_step, mesh=dict(span.mesh), ranks=span.ranks)
            for span in until(original.meshes, mark.until_step)
        ),
        same_meshes_until=comparable,
    )


def _result(
    mark: ReplayMark,
    progress: ReplayProgress,
    comparable: int,
    *,
    more: bool,
    nothing: bool,
    first: StepDifferenceView | None,
) -> ReplayResult:
    if first is not None:
        return ReplayResult.DIFFERENT
    if more:
        return ReplayResult.RUNNING
    if comparable < progress.reached_step:
        return ReplayResult.DISTURBED
    if progress.reached_step < mark.until_step:
        return ReplayResult.INCOMPLETE if progress.has_ended else ReplayResult.RUNNING
    return ReplayResult.INCOMPLETE if nothing else ReplayResult.EQUAL
