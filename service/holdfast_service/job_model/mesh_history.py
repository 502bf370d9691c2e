"""The meshes on which the committed steps of a job were computed: its mesh history. Pure.

Two runs of a job with the same mesh history have the same bits at every step, whatever faults
caused the changes. So a replay that follows the history without faults proves a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class MeshSpan:
    """The mesh of the steps after `after_step`, up to the next span."""

    after_step: int
    mesh: Mapping[str, int]
    """Size of each axis; axes of size 1 are left out."""

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())

    @classmethod
    def of(cls, after_step: int, mesh: Mapping[str, int]) -> MeshSpan:
        return cls(after_step, larger_axes(mesh))


def larger_axes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The axes of more than one rank, in order of their names: equal for the same mesh."""
    return {axis: size for axis, size in sorted(mesh.items()) if size > 1}


def mesh_history(attempts: Iterable[tuple[int, Mapping[str, int]]]) -> tuple[MeshSpan, ...]:
    """The history from all attempts in order, each as (restored step, mesh).

    An attempt computes the steps after the one that it restored again, if an earlier attempt had
    computed them: the later one counts.
    """
    spans: list[MeshSpan] = []
    for restored, mesh in attempts:
        spans = [span for span in spans if span.after_step < restored]
        coming = MeshSpan.of(restored if spans else 0, mesh)
        if not spans or spans[-1].mesh != coming.mesh:
            spans.append(coming)
    return tuple(spans)


def until(spans: Sequence[MeshSpan], last_step: int) -> tuple[MeshSpan, ...]:
    """The part of a history that has steps up to `last_step`."""
    return tuple(span for span in spans if span.after_step < last_step)


def since(spans: Sequence[MeshSpan], first_step: int) -> tuple[MeshSpan, ...]:
    """The part of a history that has steps after `first_step`, at which the job began."""
    later = [span for span in spans if span.after_step > first_step]
    begin = [span for span in spans if span.after_step <= first_step][-1:]
    return (*(MeshSpan(0, span.mesh) for span in begin), *later)


def same_until(left: Sequence[MeshSpan], right: Sequence[MeshSpan], last_step: int) -> int:
    """The last step, at most `last_step`, up to which two histories have the same meshes."""
    ours, theirs = until(left, last_step), until(right, last_step)
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return min(mine.after_step, other.after_step)
    shorter = min(len(ours), len(theirs))
    rest = (*ours[shorter:], *theirs[shorter:])
    return rest[0].after_step if rest else last_step
