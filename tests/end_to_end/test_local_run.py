"""`holdfast run --local` as a user runs it: one command, and nothing is left of what it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import eventually

from holdfast.cli.exit_codes import ExitCode
from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.embedded_cluster.local_cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
END_S = 60.0
SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
open("written", "a").write("here")
if "save" in sys.argv:
    def save(*_):
        print("saved", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, save)
print(sys.argv[1:], flush=True)
print("rank", rank, "of", dist.get_world_size(), flush=True)
if {"wait", "save"} & {*sys.argv}:
    time.sleep(600)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    yield tmp_path
    for run in (tmp_path / "runs").glob("*"):
        local_cluster.stop(run)


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    options = ("--local", "--data-dir", str(folder / "runs"), "--nproc-per-node", "2")
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", *options, "--", "train.py", *words],
        cwd=folder / "code",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until_both_ranks_write(command: subprocess.Popen[str]) -> list[str]:
    assert command.stdout is not None
    seen: list[str] = []
    for text in command.stdout:
        seen.append(text)
        if {"[rank 0] rank 0 of 2\n", "[rank 1] rank 1 of 2\n"} <= set(seen):
            return seen
    pytest.fail("".join(seen))


def run_and_cluster(folder: Path) -> tuple[Path, LocalCluster]:
    (run,) = (folder / "runs").iterdir()
    cluster = local_cluster.find(run)
    assert cluster is not None
    assert len(processes.of_cluster(cluster.cluster_id)) > 4
    return run, cluster


def left_of(folder: Path, cluster: LocalCluster) -> list[str]:
    marked = [str(pid) for pid in processes.of_cluster(cluster.cluster_id)]
    named = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]
    places = [place for place in (cluster.temp_dir, cluster.shm_root) if Path(place).exists()]
    return [*marked, *named, *places]


def test_a_run_of_two_ranks_succeeds_and_keeps_its_output_and_files(folder: Path) -> None:
    words = ["two words", 'it\'s "quoted"', ""]
    command = started(folder, *words)
    seen = until_both_ranks_write(command)
    assert {"starting a server on this machine\n", f"[rank 0] {words}\n"} <= set(seen)
    run, cluster = run_and_cluster(folder)
    rest = command.communicate(timeout=END_S)[0]
    assert command.returncode == ExitCode.OK, rest
    assert rest.splitlines()[-1] == f"output and files of this run: {run}"
    assert left_of(folder, cluster) == []
    assert re.search(r"1/rank 1 rank 1 of 2$", (run / "output.log").read_text(), re.MULTILINE)
    assert list(run.glob("**/written")), "files beside the script stay"
    assert not (folder / "code" / "written").exists()


@pytest.mark.soak
def test_a_killed_command_leaves_no_process_behind(folder: Path) -> None:
    command = started(folder, "wait")
    until_both_ranks_write(command)
    run, cluster = run_and_cluster(folder)
    command.kill()
    command.wait()
    eventually(lambda: not left_of(folder, cluster), END_S)
    assert (run / "output.log").exists()


@pytest.mark.soak
def test_ctrl_c_lets_the_program_save(folder: Path) -> None:
    command = started(folder, "save")
    until_both_ranks_write(command)
    _, cluster = run_and_cluster(folder)
    command.send_signal(signal.SIGINT)
    rest = command.communicate(timeout=END_S)[0]
    assert command.returncode == ExitCode.INTERRUPTED, rest
    assert rest.count("] saved\n") == 2, rest
    assert "CANCELLED" in rest
    assert left_of(folder, cluster) == []


@pytest.mark.soak
def test_a_killed_server_ends_the_command_with_the_reason(folder: Path) -> None:
    """Its cluster runs on without it: the command ends that too."""
    command = started(folder, "wait")
    until_both_ranks_write(command)
    run, cluster = run_and_cluster(folder)
    (server,) = (
        process
        for process in psutil.Process(command.pid).children()
        if "serve" in process.cmdline()
    )
    server.kill()
    rest = command.communicate(timeout=END_S)[0]
    assert command.returncode == ExitCode.SERVER, rest
    assert "the server of this command has ended with status -9" in rest
    assert str(run / "server.log") in rest
    assert left_of(folder, cluster) == []


@pytest.mark.soak
def test_a_command_and_a_server_that_are_killed_at_once_leave_no_process(folder: Path) -> None:
    command = started(folder, "wait")
    until_both_ranks_write(command)
    _, cluster = run_and_cluster(folder)
    os.killpg(command.pid, signal.SIGSTOP)
    for process in psutil.Process(command.pid).children():
        process.kill()
    command.kill()
    command.wait()
    eventually(lambda: not left_of(folder, cluster), END_S)
