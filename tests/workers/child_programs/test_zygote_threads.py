"""A zygote with threads is never forked: real zygotes, whose recipe is a module of the test."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from tests.support.nodes.agent_config import agent_config
from tests.support.nodes.supervised import small_training
from tests.support.waiting import eventually

from holdfast_workers.ipc import linux_processes
from holdfast_workers.ipc.children import Child, ChildProcesses
from holdfast_workers.protocol.processes import StoreJob, ZygoteConfig

pytestmark = pytest.mark.chaos
WAIT_S = 120.0

STARTS_A_THREAD_AFTER_THE_FIRST_FORK = """
import os, threading, time
def start():
    threading.Thread(target=time.sleep, args=(600.0,), name="restarted", daemon=True).start()
os.register_at_fork(after_in_parent=start)
def train(ctx): ...
"""

FINDS_NO_DATA = """
from holdfast_workers.data.corpus import DataUnavailable
raise DataUnavailable("the manifest did not come")
"""


def threads_of(pid: int | None) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


def end(child: Child) -> None:
    child.kill()
    os.waitpid(child.pid, 0)
    child.close()


def zygote_config(folder: Path, module: str) -> ZygoteConfig:
    """Of a function in a module with this text, which the zygote finds in `folder`."""
    (folder / "users_module.py").write_text(module)
    training = small_training(function="users_module:train").model_dump(mode="json")
    return agent_config(folder, training=training, env={"PYTHONPATH": str(folder)}).zygote_config


def test_a_zygote_that_gets_a_thread_later_is_replaced_by_one_without_the_recipe(
    tmp_path: Path,
) -> None:
    linux_processes.become_subreaper()
    named: list[tuple[str, ...]] = []
    config = zygote_config(tmp_path, STARTS_A_THREAD_AFTER_THE_FIRST_FORK)
    processes = ChildProcesses(config, WAIT_S, WAIT_S, on_threads=named.append)
    try:
        children = [processes.fork("store", StoreJob("127.0.0.1"))]
        assert named == []
        eventually(lambda: threads_of(processes.pid) == 2, WAIT_S, "the zygote's thread")
        children += [processes.fork("store", StoreJob("127.0.0.1")) for _ in range(2)]
        assert threads_of(processes.pid) == 1
        assert named == [("code that ran after the imports (restarted)",)]
        assert [psutil.Process(child.pid).ppid() for child in children] == [os.getpid()] * 3
        for child in children:
            end(child)
    finally:
        processes.stop()


def test_a_zygote_whose_data_is_away_forks_processes_that_wait_for_it(tmp_path: Path) -> None:
    linux_processes.become_subreaper()
    config = zygote_config(tmp_path, FINDS_NO_DATA)
    processes = ChildProcesses(config, WAIT_S, WAIT_S)
    try:
        end(processes.fork("store", StoreJob("127.0.0.1")))
    finally:
        processes.stop()
