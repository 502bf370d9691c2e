"""What an agent knows of its workers is what it told of them; one that never was leaves nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.agent_config import agent_config

from holdfast_workers.children import ZygoteFailed
from holdfast_workers.crew import Crew, Slot
from holdfast_workers.messages import SignalKind, WorkerState


def test_a_report_holds_all_that_the_signal_of_a_failure_told() -> None:
    told: list[tuple[SignalKind, Any]] = []
    teller = SimpleNamespace(tell=lambda kind, *_, detail, **__: told.append((kind, detail)))
    nothing: Any = None
    crew = Crew(nothing, "i1", nothing, teller, *[nothing] * 5)  # type: ignore[arg-type]
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
    brood, unused = Barren(), cast(Any, None)
    crew = Crew(config, "life", cast(Any, brood), unused, unused, unused, unused, unused, unused)
    with pytest.raises(ZygoteFailed):
        crew.fork()
    assert brood.beacons == [True]
    assert list(tmp_path.iterdir()) == []
