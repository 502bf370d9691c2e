"""Changes of an elastic world on either side, and the figures computed from them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from statistics import median
from typing import Protocol

import stamina

from benchmarks.conditions import report
from benchmarks.figures import Recovery
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalClusterError

TRIES = 3
"""To add a node: on a busy machine a raylet may exceed Ray's limit of 30 s."""


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


class ElasticWorld(Protocol):
    """An elastic job of either side on an embedded cluster."""

    @property
    def cluster(self) -> LocalCluster: ...

    def members(self) -> list[tuple[str, int]]:
        """Node and process of each rank of the present world."""
        ...

    def settle(self, ranks: int, steps: int) -> None:
        """Wait until the world has `ranks` ranks and has made `steps` more steps."""
        ...

    def recovery_from(self, cause: Callable[[], object], ranks: int) -> Recovery:
        """Call `cause`, and wait for a new step of `ranks` ranks."""
        ...

    def resize(self, nodes: int) -> object: ...


@dataclass(frozen=True)
class Sizes:
    """The sizes of the world and of the measurement, and the steps between two changes."""

    nodes: int
    ranks_per_node: int
    rounds: int
    settle_steps: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def measure(
    name: str, world: ElasticWorld, sizes: Sizes, changes: Sequence[Change]
) -> dict[Change, list[Recovery]]:
    """Make every change once per round."""
    found: dict[Change, list[Recovery]] = {change: [] for change in changes}
    world.settle(sizes.ranks, sizes.settle_steps)
    for number, change in product(range(sizes.rounds), changes):
        nodes = sizes.nodes - (change in {Change.SHRINK, Change.PLANNED_SHRINK})
        ranks = nodes * sizes.ranks_per_node
        recovered = world.recovery_from(_cause(world, change, number, nodes), ranks)
        found[change].append(recovered)
        report(f"{name}, {change}: {recovered}; load {os.getloadavg()[0]:.1f}")
        world.settle(ranks, sizes.settle_steps)
    return found


def _cause(world: ElasticWorld, change: Change, number: int, nodes: int) -> Callable[[], object]:
    """Return what causes `change`; every `number` has another victim."""
    members = world.members()
    node_id, pid = members[-1 - number % len(members)]
    match change:
        case Change.IN_PLACE:
            return partial(os.kill, pid, signal.SIGKILL)
        case Change.SHRINK:
            return partial(local_cluster.kill_node, world.cluster, node_id)
        case Change.GROW:
            retrying = stamina.retry(on=LocalClusterError, attempts=TRIES, timeout=None)
            return partial(retrying(local_cluster.add_node), world.cluster)
        case Change.PLANNED_SHRINK | Change.PLANNED_GROW:
            return partial(world.resize, nodes)


@dataclass(frozen=True)
class ChangeFigures:
    """Seconds of every repetition of a change: to the first new step, and of the pause."""

    recovery_s: list[float]
    pause_s: list[float]


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
    holdfast: Mapping[Change, Sequence[Recovery]],
    ray_train: Mapping[str, Mapping[Change, Sequence[Recovery]]],
    sizes: Sizes,
    load: Sequence[float],
) -> ElasticResult:
    """Compare Holdfast's changes with those of each setting of Ray Train."""
    ours, theirs = _figures(holdfast), {name: _figures(of) for name, of in ray_train.items()}
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
        ranks=[sizes.ranks, sizes.ranks - sizes.ranks_per_node],
        holdfast=ours,
        ray_train=theirs,
        load=[round(average, 2) for average in load],
    )


def _figures(changes: Mapping[Change, Sequence[Recovery]]) -> dict[str, ChangeFigures]:
    return {
        change.value: ChangeFigures(
            [round(each.recovery_s, 4) for each in found],
            [round(each.pause_s, 4) for each in found],
        )
        for change, found in changes.items()
    }
