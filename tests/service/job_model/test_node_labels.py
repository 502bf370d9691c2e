"""What a job asks of its nodes' labels and custom resources, and why nodes do not have it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.node_labels import (
    LabelRule,
    has_amounts,
    rules_of,
    selector_of,
    why_too_little,
    why_unlabelled,
)

KEYS = st.sampled_from(["disk", "zone"])
VALUES = st.sampled_from(["a", "b", "c"])
NODES = st.lists(st.dictionaries(KEYS, VALUES), max_size=6)
RULES = st.lists(
    st.builds(LabelRule, KEYS, st.lists(VALUES, min_size=1, max_size=2).map(tuple), st.booleans()),
    max_size=3,
)


def test_a_value_a_list_and_their_negations_are_rules_and_selectors_of_ray() -> None:
    rules = rules_of({"zone": ["!x", "!y"], "disk": ["nvme"], "rack": ["1", "2"], "os": ["!old"]})
    assert selector_of(rules) == {
        "disk": "nvme",
        "os": "!old",
        "rack": "in(1,2)",
        "zone": "!in(x,y)",
    }
    assert [str(rule) for rule in rules] == ["disk=nvme", "os!=old", "rack=1 or 2", "zone!=x or y"]


def test_a_node_without_the_label_is_not_one_with_a_value_that_is_excluded() -> None:
    (rule,) = rules_of({"disk": ["!hdd"]})
    assert rule.allows({}) and rule.allows({"disk": "nvme"}) and not rule.allows({"disk": "hdd"})
    (rule,) = rules_of({"disk": ["nvme", "ssd"]})
    assert rule.allows({"disk": "ssd"}) and not rule.allows({}) and not rule.allows({"disk": "hdd"})


@pytest.mark.parametrize(
    ("rules", "needed", "reason"),
    [
        (
            {"disk": ["nvme"]},
            1,
            "no node has label disk=nvme; nodes have disk=hdd (2), disk=ssd (1), 1 has no disk",
        ),
        (
            {"disk": ["ssd"]},
            2,
            "only 1 of 4 nodes has label disk=ssd; nodes have disk=hdd (2), disk=ssd (1), 1 has no "
            "disk",
        ),
        ({"rack": ["7"]}, 1, "no node has label rack=7; nodes have no label rack"),
        (
            {"disk": ["ssd"], "zone": ["b"]},
            1,
            "no node has all of the labels disk=ssd, zone=b",
        ),
        ({"disk": ["!ssd"]}, 3, ""),
        ({}, 9, ""),
    ],
)
def test_a_reason_names_the_label_and_what_the_nodes_have(
    rules: dict[str, list[str]], needed: int, reason: str
) -> None:
    nodes = [{"disk": "hdd"}, {"disk": "hdd", "zone": "b"}, {"disk": "ssd"}, {}]
    assert why_unlabelled(rules_of(rules), nodes, needed) == reason


@pytest.mark.parametrize(
    ("amounts", "needed", "reason"),
    [
        ({"tpu": 1}, 1, "no node has 1 tpu; nodes have fpga (2), nic (1)"),
        ({"fpga": 3}, 1, "no node has 3 fpga; the most is 2"),
        ({"fpga": 2}, 2, "only 1 of 3 nodes has 2 fpga; the most is 2"),
        ({"fpga": 2, "nic": 1}, 1, "no node has all of 2 fpga, 1 nic"),
        (
            {"accelerator_type:H100": 0.001},
            1,
            "no node has accelerators H100; nodes have fpga (2), nic (1)",
        ),
        ({"fpga": 1}, 2, ""),
        ({}, 9, ""),
    ],
)
def test_a_reason_names_the_resource_and_what_the_nodes_have(
    amounts: dict[str, float], needed: int, reason: str
) -> None:
    assert why_too_little(amounts, [{"fpga": 2}, {"fpga": 1, "nic": 1}, {}], needed) == reason


@given(RULES, NODES, st.integers(1, 4))
def test_there_is_a_reason_exactly_if_too_few_nodes_satisfy_all_rules(
    rules: list[LabelRule], nodes: list[dict[str, str]], needed: int
) -> None:
    fitting = [
        node
        for node in nodes
        if all((node.get(rule.key) in rule.values) != rule.negated for rule in rules)
    ]
    assert bool(why_unlabelled(rules, nodes, needed)) == (bool(rules) and len(fitting) < needed)


@given(
    st.dictionaries(KEYS, st.floats(0.0001, 4)),
    st.lists(st.dictionaries(KEYS, st.floats(0, 4)), max_size=5),
    st.integers(1, 4),
)
def test_there_is_a_reason_exactly_if_too_few_nodes_have_all_amounts(
    amounts: dict[str, float], nodes: list[dict[str, float]], needed: int
) -> None:
    fitting = sum(has_amounts(node, amounts) for node in nodes)
    assert bool(why_too_little(amounts, nodes, needed)) == (bool(amounts) and fitting < needed)
