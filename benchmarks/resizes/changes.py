"""Changes of an elastic world, and the figures computed from them; pure functions without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from benchmarks.figures import AppliedStep, spread


class Change(StrEnum):
    """What happens to the world, in the order of a round."""

    IN_PLACE = "in_place"
    """SIGKILL of one rank; the world keeps its size."""
    SHRINK = "shrink"
    """SIGKILL of all processes of a node; there is no standby."""
    GROW = "grow"
    """A node has joined the cluster."""
    PLANNED_SHRINK = "planned_shrink"
    """A user has ordered one node less."""
    PLANNED_GROW = "planned_grow"
    """A user has ordered that node again."""


@dataclass(frozen=True)
class MeasuredChange:
    """One change of a world and its cost.

    A new step is one beyond every step that an older world applied. `recovery_s` runs from the
    fault, the order or the return of the node to the first new step; `pause_s` from the last step
    of the older worlds to the first new step, so that it holds a whole step of the new world.
    """

    change: Change
    ranks: tuple[int, int]
    at: float
    last_step: int
    last_step_at: float
    new_step_at: float
    phases_s: Mapping[str, float]

    @property
    def recovery_s(self) -> float:
        return self.new_step_at - self.at

    @property
    def pause_s(self) -> float:
        return self.new_step_at - self.last_step_at

    def __str__(self) -> str:
        sizes = " -> ".join(str(size) for size in self.ranks)
        text = (
            f"{self.change.value}, {sizes} ranks, after step {self.last_step}: "
            f"{self.recovery_s:.3f} s to the first new step, pause {self.pause_s:.3f} s"
        )
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases_s.items())
        return f"{text}; {phases}" if phases else text


def measure_change(
    change: Change,
    ranks: tuple[int, int],
    at: float,
    world: int,
    commits: Sequence[AppliedStep],
    phases_s: Mapping[str, float],
    *,
    reached: int = 0,
) -> MeasuredChange | None:
    """The change that ended with `world`; None: that world has made no new step yet, or the steps
    of the older ones have not arrived.

    `reached`: the last step of the older worlds, if `commits` may lack it because it was computed
    again.
    """
    before = [commit for commit in commits if commit.world < world]
    if not before:
        return None
    last = max(reached, *(commit.step for commit in before))
    new = [commit.at for commit in commits if commit.world >= world and commit.step > last]
    if not new:
        return None
    before_at = max(commit.at for commit in before)
    return MeasuredChange(change, ranks, at, last, before_at, min(new), phases_s)


@dataclass(frozen=True)
class ChangeFigures:
    """Seconds of every repetition of a change: to the first new step, and of the pause."""

    recovery_s: list[float]
    pause_s: list[float]

    def __str__(self) -> str:
        return f"to the first new step: {spread(self.recovery_s)}; pause: {spread(self.pause_s)}"


@dataclass(frozen=True)
class ElasticResult:
    """The last line of `benchmarks.elastic`: the changes of each side, and medians of them.

    `ratio` is Ray Train's recovery from a shrink, at its better setting, divided by Holdfast's
    (`shrink_s`), None if Ray Train was left out; `planned_ratio` is the pause of a planned growth
    divided by that of a recovery in place. `load`: the load averages of the machine over a minute,
    before and after.
    """

    shrink_s: float
    ratio: float | None
    ray_train_setting: str | None
    planned_ratio: float
    ranks: list[int]
    holdfast: dict[str, ChangeFigures]
    ray_train: dict[str, dict[str, ChangeFigures]]
    load: list[float]


def elastic_summary(
    holdfast: Sequence[MeasuredChange],
    ray_train: Mapping[str, Sequence[MeasuredChange]],
    load: Sequence[float],
) -> ElasticResult:
    """`ray_train`: its changes by setting."""
    ours, theirs = by_change(holdfast), {name: by_change(of) for name, of in ray_train.items()}
    shrink_s = median(ours[Change.SHRINK].recovery_s)
    shrinks = {name: median(found[Change.SHRINK].recovery_s) for name, found in theirs.items()}
    best = min(shrinks, key=lambda name: shrinks[name], default=None)
    planned_s, in_place_s = (
        median(ours[change].pause_s) for change in (Change.PLANNED_GROW, Change.IN_PLACE)
    )
    return ElasticResult(
        shrink_s=shrink_s,
        ratio=None if best is None else round(shrinks[best] / shrink_s, 2),
        ray_train_setting=best,
        planned_ratio=round(planned_s / in_place_s, 2),
        ranks=list(next(c.ranks for c in holdfast if c.change is Change.SHRINK)),
        holdfast=ours,
        ray_train=theirs,
        load=[round(average, 2) for average in load],
    )


def by_change(changes: Sequence[MeasuredChange]) -> dict[str, ChangeFigures]:
    found: dict[str, ChangeFigures] = {}
    for each in changes:
        figures = found.setdefault(each.change.value, ChangeFigures([], []))
        figures.recovery_s.append(round(each.recovery_s, 4))
        figures.pause_s.append(round(each.pause_s, 4))
    return found
