"""The environment of a program is torchrun's; device number LOCAL_RANK is the rank's own."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.support.nodes.agent_config import join_order

from holdfast_workers.ipc.visible_devices import VisibleDevices
from holdfast_workers.programs.torchrun_variables import (
    ProgramLinks,
    ordered_devices,
    program_variables,
    with_variables,
)

ORDER = join_order(
    Path("/dev/shm/x/own-5.seg"),
    attempt=3,
    rank=5,
    world_size=8,
    mesh={"dp_shard": 8, "tp": 1},
    store_host="10.0.0.7",
    store_port=4711,
    local_rank=1,
    local_world_size=4,
    node_rank=1,
    nodes=2,
)
TORCHRUN_SETS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}


def test_a_program_finds_all_that_torchrun_sets() -> None:
    variables = program_variables(ORDER, "job-1", ProgramLinks("name", "/tmp/error.json"))
    assert variables.keys() >= TORCHRUN_SETS
    expected = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
    }
    assert {name: variables[name] for name in expected} == expected


def test_every_attempt_has_another_restart_count() -> None:
    links = ProgramLinks("name", "file")
    counts = [
        program_variables(join_order(Path("own-0"), attempt=attempt), "job", links)[
            "TORCHELASTIC_RESTART_COUNT"
        ]
        for attempt in (1, 2, 7)
    ]
    assert counts == ["0", "1", "6"]


def test_a_jobs_own_variables_do_not_replace_those_of_its_rank() -> None:
    assert with_variables({"RANK": "0", "MINE": "x"}, {"RANK": "5"}) == {"RANK": "5", "MINE": "x"}


@given(ranks=st.integers(1, 8), per_rank=st.integers(1, 3), spare=st.integers(0, 3))
def test_the_device_with_the_number_of_the_rank_is_its_own(
    ranks: int, per_rank: int, spare: int
) -> None:
    node = tuple(f"GPU-{index}" for index in range(ranks * per_rank + spare))
    for rank in range(ranks):
        own = node[rank * per_rank : (rank + 1) * per_rank]
        ordered = ordered_devices(own, node, rank)
        assert ordered[rank] == own[0]
        assert sorted(ordered) == sorted(node)


def test_a_rank_without_devices_sees_none() -> None:
    assert ordered_devices((), ("0", "1"), 1) == ()


def test_the_first_variable_that_names_devices_counts() -> None:
    both = {"HIP_VISIBLE_DEVICES": "2, 3", "CUDA_VISIBLE_DEVICES": ""}
    assert VisibleDevices.of(both) == VisibleDevices(
        "HIP_VISIBLE_DEVICES",
        ("2", "3"),
    )
    assert VisibleDevices.of({}).names == ()
