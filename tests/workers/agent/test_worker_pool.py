"""What an agent knows of its workers is what it told of them; one that never was leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.agent.fork_templates import Place
from holdfast_workers.agent.worker_pool import Crew, Slot
from holdfast_workers.ipc.children import ZygoteFailed
from holdfast_workers.protocol.messages import (
    FormOrder,
    Restore,
    Seat,
    SignalKind,
    Tier,
    WorkerState,
)


def test_a_report_holds_all_that_the_signal_of_a_failure_told() -> None:
    told: list[tuple[SignalKind, Any]] = []
    teller = SimpleNamespace(tell=lambda kind, *_, detail, **__: told.append((kind, detail)))
    nothing: Any = None
    crew = Crew(nothing, "i1", nothing, nothing, teller, *[nothing] * 6)  # type: ignore[arg-type]
    child: Any = SimpleNamespace(name="n0.i1.1", pid=7)
    crew._slots[child.name] = Slot(child, WorkerState.TRAINING, attempt=3, rank=1)
    error = {"kind": "corruption", "type": "CorruptionFound", "message": "differ", "traceback": ""}
    about = {"attempt": 3, "rank": 1, "step": 9, "trip": None, "finding": {"step": 9}}
    crew.said(child.name, {"op": "failed", **error, **about})
    (report,) = crew.reports()
    assert report.failure is not None
    assert report.failure["finding"] == {"step": 9}
    assert told == [(SignalKind.WORKER_FAILED, report.failure)]


class Barren:
    """Cannot fork, and notes what was there when it was asked to."""

    def __init__(self) -> None:
        self.beacons: list[bool] = []

    def fork(self, kind: str, name: str, request: dict[str, Any]) -> None:
        self.beacons.append(Path(request["beacon"]).exists())
        raise ZygoteFailed("no memory left")


def test_a_fork_that_fails_leaves_no_beacon_behind(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    brood = Barren()
    crew = Crew(config, "life", cast(Any, brood), *[cast(Any, None)] * 8)
    with pytest.raises(ZygoteFailed):
        crew.fork()
    assert brood.beacons == [True]
    assert list(tmp_path.iterdir()) == []


class Fertile:
    """Templates whose children are nothing but what was asked of them."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.made: list[Place] = []
        self.kept: set[Place] = set()

    def attach(self, io: Any) -> None: ...

    def ensure(self, places: list[Place]) -> None:
        self.made = places

    def has(self, place: Place) -> bool:
        return place in self.made

    def keep(self, places: set[Place]) -> None:
        self.kept = places

    def fork(self, name: str, request: dict[str, Any]) -> Any:
        def kill() -> None:
            self.killed.append(name)

        return SimpleNamespace(name=name, pid=7, request=request, kill=kill, send=lambda _: True)


MESH = {"dp_shard": 2, "tp": 2}


def staffed(root: Path, **config: Any) -> tuple[Crew, Fertile]:
    """A crew whose workers `w0` and `w1` have ranks 0 and 1."""
    templates, nothing = Fertile(), cast(Any, None)
    crew = Crew(agent_config(root, **config), "life", nothing, cast(Any, templates), *[nothing] * 7)
    crew.attach(cast(Any, SimpleNamespace(watch=lambda _: None)))
    for rank in (0, 1):
        child: Any = SimpleNamespace(name=f"w{rank}", pid=7, kill=lambda: None, send=lambda _: None)
        crew._slots[child.name] = Slot(child, WorkerState.TRAINING, attempt=3, rank=rank)
    return crew, templates


def order(*workers: str) -> FormOrder:
    """Of attempt 4: ranks 0 and so on for these workers."""
    restore = Restore(Tier.INIT, step=0)
    seats = tuple(Seat(rank, worker, restore, ()) for rank, worker in enumerate(workers))
    return FormOrder(4, MESH, 4, "127.0.0.1", 1, seats)


def expected(crew: Crew) -> dict[str, int | None]:
    return {one.worker: one.expected for one in crew.reports() if one.rank is None}


def test_beside_each_rank_stands_one_that_has_built_for_it(tmp_path: Path) -> None:
    crew, _ = staffed(tmp_path)
    crew.stand_by(MESH)
    crew.stand_by(MESH)
    assert list(expected(crew).values()) == [0, 1]
    few, templates = staffed(tmp_path, spares=1)
    few.stand_by(MESH)
    assert list(expected(few).values()) == [0]
    assert [place.rank for place in templates.made] == [0]


def test_where_ranks_have_devices_nobody_stands_beside_them(tmp_path: Path) -> None:
    crew, _ = staffed(tmp_path, gpus_per_worker=1)
    crew.stand_by(MESH)
    assert expected(crew) == {}


def test_who_stands_beside_a_rank_stays_and_once_it_has_it_another_comes(tmp_path: Path) -> None:
    crew, templates = staffed(tmp_path)
    crew.stand_by(MESH)
    first, second = expected(crew)
    crew.dismiss_unseated(order(first, "w1"))
    assert set(expected(crew)) == {first, second}
    crew.seat(order(first, "w1"), order(first, "w1").seats[0], {})
    crew.stand_by(MESH)
    assert sorted(rank for rank in expected(crew).values() if rank is not None) == [0, 1]
    assert templates.killed == []


def test_who_has_built_for_a_rank_that_went_elsewhere_is_dismissed(tmp_path: Path) -> None:
    crew, templates = staffed(tmp_path)
    crew.stand_by(MESH)
    _, second = expected(crew)
    crew.dismiss_unseated(order("w0"))
    assert templates.killed == [second]
    assert templates.kept == {Place.of({"mesh": MESH, "rank": 0})}


def test_a_rank_without_a_spare_worker_comes_from_its_template_too(tmp_path: Path) -> None:
    crew, _ = staffed(tmp_path)
    crew.stand_by(MESH)
    spare = set(expected(crew))
    slot = crew.seat(order("w0", "w1"), replace(order("w0").seats[0], worker=None), {})
    assert slot is not None and slot.name not in spare
    assert slot.expected == 0


def test_a_fence_does_not_wait_for_who_never_had_a_rank(tmp_path: Path) -> None:
    crew, templates = staffed(tmp_path)
    crew.stand_by(MESH)
    for slot in crew._slots.values():
        slot.parked_for = 4 if slot.rank is not None else 0
    crew.fence(4)
    assert templates.killed == []
