"""A fault for a rank comes to the process that has it, at whatever moment it is ordered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.waiting import eventually

from holdfast_workers.agent import node_agent
from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.fault_injection import link_cut
from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.fault_injection.orders import CannotInject, FaultOrders
from holdfast_workers.ipc.children import Child
from holdfast_workers.protocol.messages import FormOrder, Restore, Seat, Tier

KILL = Injection(FaultKind.KILL, rank=0)
TOLD = {"number": 7, "fault": KILL.document()}


class Process:
    """A process of a rank that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> bool:
        self.told.append(message)
        return True


def orders_of_nobody(root: Path) -> FaultOrders:
    return FaultOrders(root, lambda rank: None, None, None, lambda code: None)


def test_a_fault_that_comes_while_its_rank_is_being_forked_reaches_the_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "join_fields", lambda order, seat, config: {})
    orders, process = orders_of_nobody(tmp_path), Process()

    def seat(order: FormOrder, seat: Seat, join: dict[str, Any]) -> Any:
        orders.take(7, KILL)  # after what is due was looked up, before the rank has a process
        process.send({"op": "join", **join})
        return SimpleNamespace(child=process)

    memory = SimpleNamespace(
        set_partners=lambda *_: None, whereabouts=lambda rank: {}, seated=lambda *_: None
    )
    node = SimpleNamespace(
        _memory=memory,
        _config=None,
        _crew=SimpleNamespace(seat=seat),
        _fault_orders=orders,
    )
    place = Seat(0, None, Restore(Tier.INIT, 0), ())
    order = FormOrder(1, {"dp_shard": 1}, 1, "127.0.0.1", 1, (place,))
    NodeAgent._take_seat(cast("NodeAgent", node), order, place)
    assert process.told == [{"op": "join", "faults": []}, {"op": "inject", **TOLD}]


def test_a_fault_is_handed_on_until_it_has_fired(tmp_path: Path) -> None:
    orders, process, other = orders_of_nobody(tmp_path), Process(), Process()
    orders.take(7, KILL)
    assert orders.due(0) == [TOLD]
    orders.hand_on(1, cast("Child", other))
    orders.hand_on(0, cast("Child", process))
    orders.fired(7)
    orders.hand_on(0, cast("Child", process))
    assert process.told == [{"op": "inject", **TOLD}]
    assert other.told == []


def test_links_are_cut_for_as_long_as_it_was_said_and_only_where_they_may_be(
    tmp_path: Path,
) -> None:
    cut: list[float] = []
    orders = FaultOrders(tmp_path, lambda rank: None, None, cut.append, lambda code: None)
    orders.take(1, Injection(FaultKind.PARTITION, rank=0, duration_s=2.5))
    eventually(lambda: cut == [2.5], 5.0)
    with pytest.raises(CannotInject, match=link_cut.VARIABLE):
        orders_of_nobody(tmp_path).take(1, Injection(FaultKind.PARTITION, rank=0))
    assert link_cut.link_cutter({}) is None
