"""What a job needs of each node, from its spec: lower bounds that grow with what they stand for."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.job_model.job_spec import JobSpec, parse
from holdfast_service.job_model.model_memory import shapes_of
from holdfast_service.job_model.node_needs import needs_of
from holdfast_workers.protocol.node_needs import NodeNeeds


def spec_of(
    dp_shard: int = 4, tp: int = 1, per_node: int = 2, copies: int = 1, **changes: Any
) -> JobSpec:
    document = {
        "name": "x",
        "train": {"global_batch": 64, "micro_batch": 1},
        "parallel": {"dp_shard": dp_shard, "tp": tp},
        "resources": {"workers_per_node": per_node, **changes.pop("resources", {})},
        "checkpoint": {"memory": {"copies": copies}},
        **changes,
    }
    return parse(document, None)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_all_nodes_together_have_room_for_the_state_and_all_its_copies_twice(
    dp_shard: int, tp: int, per_node: int, copies: int, layers: int
) -> None:
    if dp_shard * tp % per_node:
        per_node = 1
    model = {"layers": layers}
    spec = spec_of(dp_shard, tp, per_node, copies, model=model)
    nodes = spec.training_nodes
    elements = sum(prod(shape) for shape in shapes_of(spec).values())
    whole = 3 * 4 * elements  # parameters and two moments in float32
    kept = 2 * (1 + min(copies, nodes - 1))
    needs = needs_of(spec)
    assert nodes * needs.shm_bytes >= kept * whole
    ranks = dp_shard * tp
    norms = tp * 4 * 3 * spec.model.dim * (2 * layers + 1)  # every tensor rank has them whole
    padding = ranks * kept * (20 << 10)
    assert nodes * needs.shm_bytes <= kept * (whole + norms) * 1.05 + padding + _top(spec, kept)
    assert needs.ram_bytes >= needs.shm_bytes


def _top(spec: JobSpec, kept: int) -> float:
    """Embedding and head, which every tensor rank has whole."""
    return kept * spec.parallel.tp * 3 * 4 * 2 * 256 * spec.model.dim


@given(st.integers(0, 2), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_more_copies_threads_and_ranks_need_more(copies: int, threads: int, per_node: int) -> None:
    def needs(**changes: int) -> NodeNeeds:
        given = {"copies": copies, "threads": threads, "per_node": per_node} | changes
        resources = {"threads_per_worker": given["threads"]}
        return needs_of(spec_of(8, 1, given["per_node"], given["copies"], resources=resources))

    before = needs()
    more = needs(copies=copies + 1) if copies + 1 < 8 // per_node else before
    assert more.shm_bytes >= before.shm_bytes and more.ram_bytes >= before.ram_bytes
    assert needs(threads=threads + 1).tasks == before.tasks + per_node
    assert needs(per_node=2 * per_node).tasks > before.tasks


def test_without_checkpoints_in_memory_no_shared_memory_is_needed() -> None:
    off = spec_of(checkpoint={"memory": {"every_steps": 0}})
    assert needs_of(off).shm_bytes == 0
    assert needs_of(off).ram_bytes > 0


def test_ranks_on_devices_have_their_model_there() -> None:
    on_host, on_device = needs_of(spec_of()), needs_of(spec_of(resources={"gpus_per_worker": 1}))
    assert on_device.shm_bytes == on_host.shm_bytes
    assert on_device.ram_bytes < on_host.ram_bytes


@pytest.mark.parametrize("key", ["function", "recipe"])
def test_of_a_users_own_state_nothing_is_known(key: str) -> None:
    changes: dict[str, Any] = {key: "mine:it"}
    needs = needs_of(spec_of(**changes))
    assert (needs.shm_bytes, needs.ram_bytes) == (0, 0) and needs.tasks > 0


def test_an_elastic_job_needs_room_for_its_smallest_mesh() -> None:
    document = {
        "name": "x",
        "train": {"global_batch": 64, "micro_batch": 1},
        "parallel": {"dp_shard": "auto"},
        "resources": {"nodes": {"min": 2, "max": 8}},
    }
    needs = needs_of(parse(document, None))
    assert needs.shm_bytes == needs_of(spec_of(2, 1, 1)).shm_bytes
    assert needs.nodes == 2, "more may share a machine, and need not"
