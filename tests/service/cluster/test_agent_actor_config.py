"""The configuration that an agent's actor makes of its seat and its node. It never raises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from tests.support.memory.certificates import LONG_AGO, certified, new_authority
from tests.support.nodes.agent_config import run_plan

from holdfast_service.cluster import agent_actor
from holdfast_service.cluster.agent_actor import MEMORY_FLOOR_VARIABLE, AgentSeat
from holdfast_service.cluster.agents import RayAgents
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.ipc.environment import CODE_FOLDER
from holdfast_workers.ipc.listening import RANGE_VARIABLE
from holdfast_workers.memory.peer_tls import TLS_VARIABLE
from holdfast_workers.node_cache.cached_file import CACHE_VARIABLE
from holdfast_workers.protocol.processes import StorageOptions

SEAT = AgentSeat(run_plan(), "n0", b"s", StorageOptions())


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of an actor on a node whose address is on none of its interfaces."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    context = SimpleNamespace(get_node_labels=dict)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(seat: AgentSeat = SEAT) -> AgentConfig:
    return agent_actor._config(seat, "node")


def test_only_the_zygote_with_users_code_gets_the_folder_of_the_code(working_folder: Path) -> None:
    assert config().zygote_config.code == "", "there is no code package"
    (working_folder / CODE_FOLDER).mkdir()
    made = config()
    assert made.zygote_config.code == str(working_folder / CODE_FOLDER)
    assert not hasattr(made.storage_zygote_config, "code")


def test_a_node_with_a_wrong_setting_and_no_interface_is_reported_and_not_raised(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY_FLOOR_VARIABLE, "fast")
    made = config()
    assert MEMORY_FLOOR_VARIABLE in made.problem
    assert "GLOO_SOCKET_IFNAME" not in made.env


def test_caches_are_in_a_folder_of_the_node(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/of-the-node")
    assert config().cache_dir == "/home/of-the-node/.cache/holdfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert config().cache_dir == "/caches/holdfast"
    monkeypatch.setenv(CACHE_VARIABLE, "/fast-disk")
    assert config().cache_dir == "/fast-disk"


def test_a_node_without_a_folder_for_caches_says_which_variable_to_set(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert f"set {CACHE_VARIABLE}" in config().problem


def test_the_range_of_ports_is_the_nodes_and_a_wrong_one_is_reported(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANGE_VARIABLE, "20000-20999")
    assert (config().ports, config().problem) == ("20000-20999", "")
    monkeypatch.setenv(RANGE_VARIABLE, "20000")
    assert config().ports == "" and "write 20000-20999" in config().problem


def test_certificates_are_the_nodes_and_unusable_ones_are_reported(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (config().tls_dir, config().problem) == ("", "")
    folder = certified(tmp_path / "tls", new_authority())
    monkeypatch.setenv(TLS_VARIABLE, str(folder))
    assert (config().tls_dir, config().problem) == (str(folder), "")
    certified(folder, new_authority(), at=LONG_AGO)
    assert config().tls_dir == str(folder), "it would do without"
    assert "certificate has expired" in config().problem


def test_ranks_with_devices_are_forked_anew_unless_the_operator_asks_otherwise(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_devices = replace(SEAT, plan=run_plan(gpus_per_worker=1))
    assert (config().reform, config(on_devices).reform) == (Reform.IN_PLACE, Reform.FORK)
    monkeypatch.setenv("HOLDFAST_REFORM", "in_place")
    made = config(on_devices)
    assert made.reform is Reform.IN_PLACE and made.problem == ""
    assert made.zygote_config.env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    monkeypatch.setenv("HOLDFAST_REFORM", "in-place")
    assert "in_place or fork" in config().problem


def test_threads_domains_deadlines_and_needs_of_the_job_reach_the_agent(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"example.com/rack": "r7", "switch": "s1", "holdfast.io/fast-domain": "s2"}
    context = SimpleNamespace(get_node_labels=lambda: labels)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    resources = {
        "threads_per_worker": 4,
        "domains": {"failure": "example.com/rack", "fast": "switch"},
    }
    timeouts = {"start_s": 500, "form_s": 300, "load_s": 7200, "save_s": 600, "publish_s": 200}
    spec = parse({"name": "x", "resources": resources, "timeouts": timeouts}, None)
    agents = RayAgents(JobPlan("job", spec, installation="i"), b"s", StorageOptions())
    made = agent_actor._config(agents.seat_of("n0"), "node")
    assert made.plan.resources.threads_per_worker == 4
    assert made.env["OMP_NUM_THREADS"] == "1", "of the zygote, which must not have threads"
    assert (made.domain, made.fast_domain) == ("r7", "s1")
    assert made.plan.needs == needs_of(spec) and made.plan.needs.shm_bytes > 0
    assert (made.plan.zygote_start_timeout_s, made.plan.form_timeout_s) == (500, 150)
    assert (made.plan.load_timeout_s, made.plan.load_bound_s) == (7200, 7200)
    assert made.plan.timeouts == spec.timeouts


@pytest.mark.parametrize("grace_s", [0, 30, 120])
def test_the_ranks_of_a_program_may_use_their_grace_before_they_leave(grace_s: float) -> None:
    spec = parse({"name": "x", "command": "train", "program": {"grace_s": grace_s}}, None)
    assert RecoveryConfig(JobPlan("job", spec)).leave_timeout_s > 2 * grace_s
    own = parse({"name": "x"}, None)
    assert RecoveryConfig(JobPlan("job", own)).leave_timeout_s == RecoveryConfig.leave_s


def test_an_agent_whose_working_folder_was_replaced_ends_to_be_started_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    program = (
        "import os, sys; from holdfast_service.cluster import agent_actor; "
        "agent_actor.START_AGAIN_S = 0; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); "
        "agent_actor.code_folder(); print('returned')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "returned" not in done.stdout and "Traceback" not in done.stderr
