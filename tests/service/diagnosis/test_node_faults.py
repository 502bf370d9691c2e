"""What is wrong with a node is found, named with its node, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.diagnosis.grades import Grade
from holdfast_service.diagnosis.node_faults import (
    CLOCK_BAD_S,
    CLOCK_ODD_S,
    GIB,
    MIB,
    InspectedNode,
    NodeFinding,
    findings,
)
from holdfast_service.diagnosis.unfit_software import SoftwareFault
from holdfast_workers.health.node_facts import NodeFacts

SERVER = NodeFacts(
    hostname="server",
    python="3.11.9",
    packages=(("ray", "2.60.0"), ("torch", "2.13.0"), ("holdfast-train", "0.2.0")),
    build="b1",
    cpus=8,
    memory_total=64 * GIB,
    memory_available=32 * GIB,
    shared_total=32 * GIB,
    shared_free=32 * GIB,
    cache_free=100 * GIB,
    open_files=65536,
)
SOUND = [InspectedNode(f"n{n}", f"10.0.0.{n}", SERVER) for n in range(4)]
FAULTS = {
    "no answer": (InspectedNode("n1", "10.0.0.1", problem="it did not answer"), "node"),
    "no holdfast": (
        InspectedNode("n1", "10.0.0.1", problem="x", software=SoftwareFault("holdfast", "s", "a")),
        "holdfast",
    ),
    "python": (replace(SOUND[1], facts=replace(SERVER, python="3.12.1")), "python"),
    "ray": (
        replace(SOUND[1], facts=replace(SERVER, packages=(("ray", "2.50.0"), SERVER.packages[1]))),
        "ray",
    ),
    "torch": (
        replace(SOUND[1], facts=replace(SERVER, packages=(SERVER.packages[0], ("torch", "2.11")))),
        "torch",
    ),
    "no torch": (
        replace(SOUND[1], facts=replace(SERVER, packages=SERVER.packages[:1])),
        "torch",
    ),
    "holdfast": (replace(SOUND[1], facts=replace(SERVER, build="b2")), "holdfast"),
    "clock": (replace(SOUND[1], clock_ahead_s=-7.0, clock_error_s=0.1), "clock"),
    "small shm": (replace(SOUND[1], facts=replace(SERVER, shared_total=64 * MIB)), "shm"),
    "foreign shm": (replace(SOUND[1], facts=replace(SERVER, memory_problem="not ours")), "shm"),
    "cache": (replace(SOUND[1], facts=replace(SERVER, cache_problem="read-only")), "cache"),
    "disk": (replace(SOUND[1], facts=replace(SERVER, cache_free=1)), "cache"),
    "tasks": (replace(SOUND[1], facts=replace(SERVER, tasks_limit=900, tasks=500)), "tasks"),
    "files": (replace(SOUND[1], facts=replace(SERVER, open_files=256)), "files"),
    "address": (replace(SOUND[1], listen_problem="cannot assign"), "network"),
    "link": (replace(SOUND[1], unreachable={"n2": "timed out"}), "network"),
    "certificate": (
        replace(SOUND[1], facts=replace(SERVER, tls=True, tls_problem="expired")),
        "tls",
    ),
    "gpu": (replace(SOUND[1], ray_gpus=2.0), "gpu"),
    "driver": (replace(SOUND[1], facts=replace(SERVER, gpu_problem="NVML: mismatch")), "gpu"),
    "storage": (replace(SOUND[1], storage_problem="403"), "storage"),
}


def bad(found: list[NodeFinding]) -> list[tuple[str, str]]:
    return [(each.node, each.what) for each in found if each.grade is Grade.BAD]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_node_and_what_to_do(name: str) -> None:
    node, what = FAULTS[name]
    found = findings([SOUND[0], node, *SOUND[2:]], SERVER)
    assert bad(found) == [("n1", what)]
    (fault,) = [each for each in found if each.grade is Grade.BAD]
    assert fault.seen and fault.advice and fault.host == "10.0.0.1"
    assert [each.node for each in found if each.grade is Grade.GOOD] == ["n0", "n2", "n3"]


def test_sound_nodes_have_one_good_finding_each() -> None:
    found = findings(SOUND, SERVER)
    assert [(each.node, each.grade) for each in found] == [(n.node, Grade.GOOD) for n in SOUND]
    assert "8 cores" in found[0].seen and "34.4 GB free in /dev/shm" in found[0].seen


def test_a_node_without_tls_among_others_is_named() -> None:
    tls = [replace(node, facts=replace(SERVER, tls=True, tls_days=300.0)) for node in SOUND]
    assert bad(findings(tls, SERVER)) == []
    assert bad(findings([*tls[:2], *SOUND[2:]], SERVER)) == [("n2", "tls"), ("n3", "tls")]
    assert bad(findings([tls[0], *SOUND[1:]], SERVER)) == [("n0", "tls")]


def test_a_certificate_that_expires_soon_is_odd() -> None:
    node = replace(SOUND[0], facts=replace(SERVER, tls=True, tls_days=12.4))
    (fault,) = [each for each in findings([node], SERVER) if each.grade is Grade.ODD]
    assert fault.what == "tls" and "expires in 12 days" in fault.seen


def test_the_link_names_the_address_of_the_other_end() -> None:
    (fault,) = [f for f in findings([FAULTS["link"][0], *SOUND[2:]], SERVER) if f.advice]
    assert "10.0.0.2: timed out" in fault.seen


def test_locked_memory_matters_with_accelerators_only() -> None:
    limited = replace(SERVER, locked_bytes=MIB, gpus=("H100",))
    assert not [f for f in findings([replace(SOUND[0], facts=limited)], SERVER) if "lock" in f.what]
    with_gpu = replace(SOUND[0], facts=limited, ray_gpus=1.0)
    assert [f.grade for f in findings([with_gpu], SERVER) if f.what == "memlock"] == [Grade.ODD]


@given(ahead=st.floats(-100, 100), error=st.floats(0, 100))
def test_a_clock_is_accused_only_of_what_was_measured_for_certain(
    ahead: float, error: float
) -> None:
    node = replace(SOUND[0], clock_ahead_s=ahead, clock_error_s=error)
    clock = [each.grade for each in findings([node], SERVER) if each.what == "clock"]
    certain = abs(ahead) - error
    if certain >= CLOCK_BAD_S:
        assert clock == [Grade.BAD]
    else:
        assert clock == ([Grade.ODD] if certain >= CLOCK_ODD_S else [])


@given(st.lists(st.sampled_from(list(FAULTS.values())), max_size=3))
def test_every_bad_node_is_named_and_no_other(chosen: list[tuple[InspectedNode, str]]) -> None:
    faulty = [
        replace(node, node=f"x{at}", host=f"10.1.0.{at}", unreachable={})
        for at, (node, _) in enumerate(chosen)
        if node.unreachable == {}
    ]
    found = findings([*SOUND, *faulty], SERVER)
    assert {node for node, _ in bad(found)} == {node.node for node in faulty}
