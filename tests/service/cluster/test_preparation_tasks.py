"""How many tasks of a preparation a node gets, and how they end."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast_service.cluster.preparation_tasks import TASK_BYTES, TaskSlots, carried_out
from holdfast_workers.errors import WorkersError

GB = 10**9
NODES = {
    "large": {"CPU": 6.0, "memory": 900.0 * GB},
    "little memory": {"CPU": 6.0, "memory": 2.9 * TASK_BYTES},
    "least": {"CPU": 1.0, "memory": 0.5 * GB},
    "without CPUs": {"memory": 900.0 * GB},
}


def test_a_node_gets_as_many_tasks_as_it_has_processors_and_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"NodeID": name, "Alive": True, "Resources": each} for name, each in NODES.items()]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    slots = TaskSlots()
    taken: Counter[str] = Counter()
    while (node := slots.take()) is not None:
        taken[node] += 1
    assert taken == {"large": 6, "little memory": 2, "least": 1}
    slots.give_back("little memory")
    assert slots.take() == "little memory"
    assert slots.take() is None


@pytest.mark.parametrize("length", [1_999, 2_000, 2_001, 10**6])
def test_the_reason_of_a_refusal_is_bounded(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")

    def refuse() -> None:
        raise WorkersError("x" * length)

    refused = carried_out(refuse).refused
    expected = "x" * length if length <= 2_000 else f"{'x' * 1_997}..."
    assert refused == expected
