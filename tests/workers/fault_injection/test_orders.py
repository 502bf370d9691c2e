"""A fault for a rank reaches the rank's process, at whatever time it is ordered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.waiting import eventually

from holdfast_workers.agent import node_agent
from holdfast_workers.agent.node_agent import NodeAgent
from holdfast_workers.fault_injection import network_faults
from holdfast_workers.fault_injection.kinds import FaultKind, Injection
from holdfast_workers.fault_injection.orders import CannotInject, FaultOrders, NodeMeans
from holdfast_workers.ipc.children import Child
from holdfast_workers.protocol.messages import FormOrder, Restore, Seat, Tier
from holdfast_workers.protocol.processes import ArmFault

KILL = Injection(FaultKind.KILL, rank=0)
ORDER = ArmFault(7, KILL.document())


class Process:
    """A process of a rank that records the messages sent to it."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> bool:
        self.sent.append(message)
        return True


def orders_without_ranks(root: Path) -> FaultOrders:
    return FaultOrders(lambda rank: None, NodeMeans(root))


def test_a_fault_that_arrives_during_the_fork_of_its_rank_reaches_the_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "join_order", lambda *_: None)
    orders, process = orders_without_ranks(tmp_path), Process()

    def seat(order: FormOrder, seat: Seat, join: None, faults: tuple[ArmFault, ...]) -> Any:
        orders.accept(7, KILL)  # after pending orders were read, before the rank has a process
        process.send(faults)
        return SimpleNamespace(child=process)

    memory = SimpleNamespace(
        set_partners=lambda *_: None, own_segment=lambda rank: None, on_seated=lambda *_: None
    )
    node = SimpleNamespace(
        _memory=memory,
        _config=None,
        _worker_pool=SimpleNamespace(seat=seat),
        _fault_orders=orders,
    )
    place = Seat(0, None, Restore(Tier.INIT, 0), ())
    order = FormOrder(1, {"dp_shard": 1}, 1, "127.0.0.1", 1, (place,))
    NodeAgent._take_seat(cast("NodeAgent", node), order, place)
    assert process.sent == [(), ORDER]


def test_a_fault_is_sent_to_each_new_process_until_it_has_fired(tmp_path: Path) -> None:
    orders, process, other = orders_without_ranks(tmp_path), Process(), Process()
    orders.accept(7, KILL)
    assert orders.pending(0) == (ORDER,)
    orders.send_pending(1, cast("Child", other))
    orders.send_pending(0, cast("Child", process))
    orders.fired(7)
    orders.send_pending(0, cast("Child", process))
    assert process.sent == [ORDER]
    assert other.sent == []


def test_links_are_cut_for_the_given_time_and_only_where_allowed(
    tmp_path: Path,
) -> None:
    cut: list[float] = []
    orders = FaultOrders(lambda rank: None, NodeMeans(tmp_path, cut_links=cut.append))
    orders.accept(1, Injection(FaultKind.PARTITION, rank=0, duration_s=2.5))
    eventually(lambda: cut == [2.5])
    with pytest.raises(CannotInject, match=network_faults.VARIABLE):
        orders_without_ranks(tmp_path).accept(1, Injection(FaultKind.PARTITION, rank=0))
    assert network_faults.link_cutter({}) is None
