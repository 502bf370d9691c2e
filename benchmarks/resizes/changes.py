"""Changes of an elastic world, and the figures computed from them; pure functions without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from benchmarks.figures import AppliedStep, MeasuredSpread, spread


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
class ElasticSamples:
    """Seconds of every repetition: to the first new step where a fault began it, else the pause."""

    shrink_s: list[float]
    grow_pause_s: list[float]
    planned_pause_s: list[float]
    planned_shrink_pause_s: list[float]
    in_place_s: list[float]
    in_place_pause_s: list[float]
    ray_train_s: dict[str, list[float]]
    ray_train_grow_pause_s: dict[str, list[float]]


@dataclass(frozen=True)
class ElasticResult:
    """The last line of `benchmarks.elastic`: medians, in seconds.

    `shrink_s`, `in_place_s` and `ray_train_s` run from the fault to the first new step, the pauses
    from the last step of the old world. `ratio` is `ray_train_s / shrink_s`, with Ray Train at its
    better setting; `planned_ratio` is `planned_pause_s / in_place_pause_s`. None: Ray Train was
    left out. `load`: the load averages of the machine over a minute, before and after.
    """

    shrink_s: float
    grow_pause_s: float
    planned_pause_s: float
    in_place_s: float
    ray_train_s: float | None
    ratio: float | None
    planned_shrink_pause_s: float
    in_place_pause_s: float
    planned_ratio: float
    ray_train_setting: str | None
    ranks: list[int]
    samples: ElasticSamples
    load: list[float]


def elastic_summary(
    holdfast: Sequence[MeasuredChange],
    ray_train: Mapping[str, Sequence[MeasuredChange]],
    load: Sequence[float],
) -> ElasticResult:
    """`ray_train`: its changes by setting."""
    samples = ElasticSamples(
        shrink_s=_recoveries(holdfast, Change.SHRINK),
        grow_pause_s=_pauses(holdfast, Change.GROW),
        planned_pause_s=_pauses(holdfast, Change.PLANNED_GROW),
        planned_shrink_pause_s=_pauses(holdfast, Change.PLANNED_SHRINK),
        in_place_s=_recoveries(holdfast, Change.IN_PLACE),
        in_place_pause_s=_pauses(holdfast, Change.IN_PLACE),
        ray_train_s={name: _recoveries(found, Change.SHRINK) for name, found in ray_train.items()},
        ray_train_grow_pause_s={
            name: _pauses(found, Change.GROW) for name, found in ray_train.items()
        },
    )
    theirs = {name: _median(found) for name, found in samples.ray_train_s.items()}
    best = min(theirs, key=lambda name: theirs[name], default=None)
    shrink_s, planned_s = _median(samples.shrink_s), _median(samples.planned_pause_s)
    in_place_pause_s = _median(samples.in_place_pause_s)
    return ElasticResult(
        shrink_s=shrink_s,
        grow_pause_s=_median(samples.grow_pause_s),
        planned_pause_s=planned_s,
        in_place_s=_median(samples.in_place_s),
        ray_train_s=None if best is None else theirs[best],
        ratio=None if best is None else round(theirs[best] / shrink_s, 2),
        planned_shrink_pause_s=_median(samples.planned_shrink_pause_s),
        in_place_pause_s=in_place_pause_s,
        planned_ratio=round(planned_s / in_place_pause_s, 2),
        ray_train_setting=best,
        ranks=list(next(c.ranks for c in holdfast if c.change is Change.SHRINK)),
        samples=samples,
        load=[round(average, 2) for average in load],
    )


def spreads(changes: Sequence[MeasuredChange]) -> dict[str, tuple[MeasuredSpread, MeasuredSpread]]:
    """By change: of the time to the first new step, and of the pause."""
    return {
        change.value: (spread(found), spread(_pauses(changes, change)))
        for change in Change
        if (found := _recoveries(changes, change))
    }


def _recoveries(changes: Sequence[MeasuredChange], change: Change) -> list[float]:
    return [round(found.recovery_s, 4) for found in changes if found.change is change]


def _pauses(changes: Sequence[MeasuredChange], change: Change) -> list[float]:
    return [round(found.pause_s, 4) for found in changes if found.change is change]


def _median(values: Sequence[float]) -> float:
    return round(median(values), 4)
