"""The demo compares every step, and leaves nothing behind when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.demo.compare import compare
from holdfast.demo.elastic_run import ElasticVerdict
from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView


def test_runs_are_equal_only_if_every_step_is_equal() -> None:
    run = {1: "a", 2: "b", 3: "c"}
    assert compare("digest", 3, run, dict(run)).same
    assert not compare("digest", 4, run, dict(run)).same, "a missing step is not equal"
    assert not compare("digest", 0, {}, {}).same, "an empty comparison proves nothing"
    other = compare("digest", 3, run, {1: "a", 3: "x"})
    assert (other.equal, other.differing, other.missing) == (1, (3,), (2,))
    assert "the first that differs is step 3" in str(other)


def test_the_elastic_demo_passes_only_if_the_world_shrank_and_grew_to_its_first_size() -> None:
    equal = compare("samples", 1, {1: "a"}, {1: "a"})
    job = cast(JobView, SimpleNamespace(state=State.SUCCEEDED, id="job-1"))
    assert ElasticVerdict(job, (6, 4, 6), (equal,)).passed
    for sizes in ((), (6,), (6, 6), (6, 4), (4, 6, 4)):
        assert not ElasticVerdict(job, sizes, (equal,)).passed, sizes
    assert not ElasticVerdict(job, (6, 4, 6), (compare("samples", 1, {1: "a"}, {}),)).passed


@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "demo", "--steps", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    seen: list[str] = []
    for text in demo.stdout:
        seen.append(text)
        if "RUNNING" in text:
            break
    assert "RUNNING" in seen[-1], "".join(seen)
    (data_dir,) = tmp_path.glob("holdfast-demo-*")
    cluster = local_cluster.find(data_dir)
    assert cluster is not None
    assert len(processes.of_cluster(cluster.cluster_id)) > 4, "the demo has started processes"
    demo.send_signal(signal.SIGINT)
    demo.send_signal(signal.SIGINT)  # a second signal shortly after
    rest = demo.communicate(timeout=90)[0]
    assert demo.returncode == ExitCode.INTERRUPTED, rest
    assert list(tmp_path.iterdir()) == []
    assert processes.of_cluster(cluster.cluster_id) == []
    assert not Path(cluster.temp_dir).exists()
    assert not Path(cluster.shm_root).exists()
    alive = [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    assert [command for command in alive if str(tmp_path) in command] == []


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_demo_shows_the_same_bits() -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "--json"], capture_output=True, text=True
    )
    assert demo.returncode == 0, demo.stderr
    verdict = json.loads(demo.stdout)
    assert verdict["passed"] and verdict["incidents"] >= 2
    assert all(run["equal"] == run["steps"] == 100 for run in verdict["compared"])


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_elastic_demo_shrinks_grows_and_reads_each_sample_once() -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "holdfast", "demo", "--elastic", "--json"],
        capture_output=True,
        text=True,
    )
    assert demo.returncode == 0, demo.stderr
    assert "shrink to a smaller mesh" in demo.stderr and "grow to a larger mesh" in demo.stderr
    verdict = json.loads(demo.stdout)
    assert verdict["passed"] and verdict["ranks"] == [6, 4, 6]
    digests, samples = verdict["compared"]
    assert samples["equal"] == samples["steps"] == 80
    # The step before the node was lost has no digest if the loss prevented its report.
    assert digests["equal"] == digests["steps"] >= 79
