"""The worker pool: its reports match its signals, a failed fork leaves no file, spare workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.nodes.agent_config import agent_config, join_order, run_plan
from tests.support.service.fake_cluster import row

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.devices import NoDeviceFree
from holdfast_workers.agent.worker_pool import Slot, WorkerPool
from holdfast_workers.ipc.children import ZygoteFailed
from holdfast_workers.ipc.linux_processes import ProcessEnd
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.protocol.messages import (
    ErrorKind,
    ErrorReport,
    FormOrder,
    Restore,
    Seat,
    Tier,
    WorkerState,
)
from holdfast_workers.protocol.processes import RankPlace, StepReport, WorkerJob, WorkerSignal
from holdfast_workers.protocol.signals import FirstStep, SignalDetail, WorkerFailed


def test_a_report_contains_the_whole_failure_that_was_signalled() -> None:
    sent: list[SignalDetail] = []
    signals = SimpleNamespace(send=lambda detail, *_, **__: sent.append(detail))
    nothing: Any = None
    config = agent_config(Path())
    pool = WorkerPool(config, "i1", nothing, nothing, signals, *[nothing] * 7)  # type: ignore[arg-type]
    child: Any = SimpleNamespace(name="n0.i1.1", pid=7)
    pool._slots[child.name] = Slot(child, WorkerState.TRAINING, attempt=3, rank=1)
    error = ErrorReport(ErrorKind.CORRUPTION, "CorruptionFound", "differ", "", step=9)
    finding = ReplicaFinding(3, 9, 8, ((0, 1),), {0: "a", 1: "b"}, (1,))
    failure = WorkerFailed(error, finding=finding)
    pool.on_message(child.name, WorkerSignal(3, 1, failure))
    (report,) = pool.reports()
    assert report.failure == failure
    assert sent == [failure]


class FailingForks:
    """Fails to fork, and records whether the beacon existed at the call."""

    def __init__(self) -> None:
        self.beacons: list[bool] = []

    def fork(self, name: str, job: WorkerJob) -> None:
        self.beacons.append(Path(job.beacon).exists())
        raise ZygoteFailed("no memory left")


def test_a_fork_that_fails_leaves_no_beacon_behind(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    child_processes = FailingForks()
    pool = WorkerPool(config, "life", cast(Any, child_processes), *[cast(Any, None)] * 9)
    with pytest.raises(ZygoteFailed):
        pool.fork()
    assert child_processes.beacons == [True]
    assert list(tmp_path.iterdir()) == []


class FakeTemplates:
    """Templates whose children are records."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.made: list[RankPlace] = []
        self.kept: set[RankPlace] = set()
        self.stop: Callable[[float], None]

    def attach(self, io: Any) -> None: ...

    def ensure(self, places: list[RankPlace]) -> None:
        self.made = places

    def has(self, place: RankPlace) -> bool:
        return place in self.made

    def keep(self, places: set[RankPlace]) -> list[Any]:
        self.kept = places
        return []

    def fork(self, name: str, job: WorkerJob) -> Any:
        def kill() -> None:
            self.killed.append(name)

        return SimpleNamespace(name=name, pid=7, job=job, kill=kill, send=lambda _: True)


WAIT_S = 60.0
MESH = {"dp_shard": 2, "tp": 2}
JOIN = join_order(Path("own-0"))


def staffed(root: Path, **config: Any) -> tuple[WorkerPool, FakeTemplates]:
    """A pool whose workers `w0` and `w1` have ranks 0 and 1."""
    templates, nothing = FakeTemplates(), cast(Any, None)
    pool = WorkerPool(
        agent_config(root, **config), "life", nothing, cast(Any, templates), *[nothing] * 8
    )
    pool.attach(cast(Any, SimpleNamespace(watch=lambda _: None)))
    for rank in (0, 1):
        child: Any = SimpleNamespace(name=f"w{rank}", pid=7, kill=lambda: None, send=lambda _: None)
        pool._slots[child.name] = Slot(child, WorkerState.TRAINING, attempt=3, rank=rank)
    return pool, templates


def order(*workers: str) -> FormOrder:
    """An order for attempt 4: ranks from 0 for these workers."""
    restore = Restore(Tier.INIT, step=0)
    seats = tuple(Seat(rank, worker, restore, ()) for rank, worker in enumerate(workers))
    return FormOrder(4, MESH, 4, "127.0.0.1", 1, seats)


def expected(pool: WorkerPool) -> dict[str, int | None]:
    return {report.worker: report.expected for report in pool.reports() if report.rank is None}


def test_each_rank_has_a_spare_worker_that_was_built_for_it(tmp_path: Path) -> None:
    pool, _ = staffed(tmp_path)
    pool.fork_spares(MESH)
    pool.fork_spares(MESH)
    assert list(expected(pool).values()) == [0, 1]
    few, templates = staffed(tmp_path, spares=1)
    few.fork_spares(MESH)
    assert list(expected(few).values()) == [0]
    assert [place.rank for place in templates.made] == [0]


def test_ranks_with_devices_have_no_spare_workers(tmp_path: Path) -> None:
    pool, _ = staffed(tmp_path, gpus_per_worker=1)
    pool.fork_spares(MESH)
    assert expected(pool) == {}


def pool_with_devices(
    root: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, per_worker: float
) -> WorkerPool:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pool, templates = staffed(root, gpus_per_worker=per_worker)
    pool._slots.clear()
    pool._child_processes = cast(Any, templates)
    return pool


def devices(pool: WorkerPool) -> list[str]:
    return [slot.job.env["CUDA_VISIBLE_DEVICES"] for slot in pool._slots.values()]


def test_each_worker_gets_all_its_devices_and_shares_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_with_devices(tmp_path, monkeypatch, "4,5,GPU-a,7", 2)
    pool.fork()
    pool.fork()
    assert devices(pool) == ["4,5", "GPU-a,7"]


@pytest.mark.parametrize("visible", ["0", "", None])
def test_a_worker_without_a_free_device_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    pool = pool_with_devices(tmp_path, monkeypatch, visible, 1)
    with pytest.raises(NoDeviceFree, match="CUDA_VISIBLE_DEVICES"):
        pool.fork()
        pool.fork()
    assert devices(pool) == (["0"] if visible else [])


def test_a_device_is_free_again_only_when_its_killed_worker_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_with_devices(tmp_path, monkeypatch, "0", 1)
    first = pool.fork()
    dying = pool._slots[first].child
    pool.end_unseated(order())
    with ThreadPoolExecutor() as threads:
        forked = threads.submit(pool.fork)
        assert wait([forked], 0.1).not_done
        pool.on_exit(dying, ProcessEnd(signal=9, name="SIGKILL"))
        forked.result(WAIT_S)
    assert devices(pool) == ["0"]


def test_a_spare_worker_is_kept_and_replaced_once_it_gets_its_rank(tmp_path: Path) -> None:
    pool, templates = staffed(tmp_path)
    pool.fork_spares(MESH)
    first, second = expected(pool)
    pool.end_unseated(order(first, "w1"))
    assert set(expected(pool)) == {first, second}
    pool.seat(order(first, "w1"), order(first, "w1").seats[0], JOIN, ())
    pool.fork_spares(MESH)
    assert sorted(rank for rank in expected(pool).values() if rank is not None) == [0, 1]
    assert templates.killed == []


def test_a_rank_that_keeps_shards_in_the_cache_is_killed_before_others_need_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "reads_token_sets", property(lambda _: True))
    pool, templates = staffed(tmp_path)
    pool.fork_spares(MESH)
    _, second = expected(pool)
    pool.end_unseated(order("w0"))
    assert templates.killed == [second]


def test_what_an_attempt_does_not_need_is_killed_once_it_makes_steps(tmp_path: Path) -> None:
    pool, templates = staffed(tmp_path)
    pool.fork_spares(MESH)
    _, second = expected(pool)
    first_steps: list[int] = []
    pool._signals = cast(Any, SimpleNamespace(send=lambda *_, **__: None))
    pool._journal = cast(Any, SimpleNamespace(add_row=lambda row: row.step == 1))
    pool._on_first_step = lambda: first_steps.append(1)
    pool.end_unseated(order("w0"))
    assert second not in expected(pool), "it gets no rank any more"
    assert templates.kept == {RankPlace.of(MESH, 0)}
    assert (templates.killed, first_steps) == ([], []), "the attempt forms first"
    evaluates = [{each.worker: each.evaluates_first for each in pool.reports()}["w0"]]
    pool.on_message("w0", WorkerSignal(4, 0, FirstStep(1, 0.0, committed=False)))
    assert (templates.killed, first_steps) == ([], []), "it may fail in the evaluation"
    evaluates += [{each.worker: each.evaluates_first for each in pool.reports()}["w0"]]
    for step in (1, 2):
        pool.on_message("w0", StepReport(0, row(4, step)))
    assert (templates.killed, first_steps) == ([second], [1])
    evaluates += [{each.worker: each.evaluates_first for each in pool.reports()}["w0"]]
    assert evaluates == [False, True, False]


def test_former_meshes_are_freed_once_all_ranks_and_partners_hold_the_state(tmp_path: Path) -> None:
    pool, _ = staffed(tmp_path)
    pool.fork_spares(MESH)
    freed: list[int] = []
    counts = []
    pool._signals = cast(Any, SimpleNamespace(send=lambda *_, **__: None))
    pool._journal = cast(Any, SimpleNamespace(add_row=lambda row: False))
    reshard = Restore(Tier.RESHARD, 5, attempt=3, mesh="dp_shard=4,tp=1")
    pool.seat(order("w0"), replace(order("w0").seats[0], restore=reshard), JOIN, ())
    pool._on_resharded = lambda: freed.append(1)
    for step in (6, 7, 8):
        held = replace(row(4, step), protected_step=step - 2)
        pool.on_message("w0", StepReport(0, held))
        counts.append(len(freed))
    assert counts == [0, 1, 1]


@pytest.mark.parametrize("end", ["fence", "stop", "stopping", "devices"])
def test_what_an_attempt_does_not_need_is_killed_without_a_step_too(
    tmp_path: Path, end: str
) -> None:
    pool, templates = staffed(tmp_path)
    pool.fork_spares(MESH)
    _, second = expected(pool)
    if end == "devices":  # its successor needs them
        pool._config = replace(pool._config, plan=run_plan(gpus_per_worker=1))
    templates.stop = lambda _: None
    pool._closing = end == "stopping"
    pool.end_unseated(order("w0"))
    if end == "fence":
        pool._slots["w0"].parked_for = 5
        pool.fence(5)
    elif end == "stop":
        pool.stop()
    assert second in templates.killed


def test_a_rank_without_a_spare_worker_is_forked_from_its_template(tmp_path: Path) -> None:
    pool, _ = staffed(tmp_path)
    pool.fork_spares(MESH)
    spare = set(expected(pool))
    slot = pool.seat(order("w0", "w1"), replace(order("w0").seats[0], worker=None), JOIN, ())
    assert slot is not None and slot.name not in spare
    assert slot.expected == 0


def test_a_fence_does_not_wait_for_workers_without_a_rank(tmp_path: Path) -> None:
    pool, templates = staffed(tmp_path)
    pool.fork_spares(MESH)
    for slot in pool._slots.values():
        slot.parked_for = 4 if slot.rank is not None else 0
    pool.fence(4)
    assert templates.killed == []
