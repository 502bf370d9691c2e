"""A server of one command: its settings, its folders, and what the user sees while it starts."""

from __future__ import annotations

import io
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.formats import code_archive
from holdfast.local_server import child_server, run_folders
from holdfast_service.embedded_cluster.local_cluster import LocalCluster, LocalNode
from holdfast_workers.node_cache import use_locks

DAY_S = 86400.0
CLUSTER = LocalCluster("id", "", 1, "/data", "/tmp/id", "/dev/shm/id", "/data/token")


def test_no_setting_leads_the_server_to_another_cluster_or_database() -> None:
    environ = {
        "HOLDFAST_DATABASE_URL": "postgresql://db",
        "HOLDFAST_RAY_ADDRESS": "head:6379",
        "HOLDFAST_STORE_URI": "s3://bucket",
        "HOLDFAST_LOCAL_GPUS": "0",
        "PATH": "/bin",
    }
    assert child_server.own_settings(environ) == {"HOLDFAST_LOCAL_GPUS": "0", "PATH": "/bin"}


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LEASE_S", "never")
    with (
        pytest.raises(child_server.ServerDidNotStart, match=r"(?s)server\.log.*lease_s"),
        child_server.child_server(tmp_path, 1),
    ):
        pytest.fail("it did start")


def test_each_stage_of_the_start_is_told() -> None:
    node = LocalNode("head", "1", "127.0.0.1", 1, head=True)
    stages = [
        None,
        CLUSTER,
        replace(CLUSTER, nodes=(node,)),
        replace(CLUSTER, nodes=(node, node), ready=True),
    ]
    assert [child_server.stage_text(cluster, nodes=1) for cluster in stages] == [
        "starting a server on this machine",
        "starting Ray",
        "starting Ray: 1 of 2 raylets run",
        "connecting to Ray",
    ]


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    made = [run_folders.make(tmp_path / "runs", "train", 0.0) for _ in range(3)]
    assert len(set(made)) == 3 and all(folder.is_dir() for folder in made)
    assert all("-train" in folder.name for folder in made)
    assert {folder.stat().st_mode & 0o777 for folder in made} == {0o700}


def test_a_run_within_a_folder_of_code_is_not_sent_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    run = run_folders.make(tmp_path / "runs", "../of: a/name", 0.0)
    assert run.parent == tmp_path / "runs" and run.name.endswith("-..-of-a-name")
    (run / "holdfast.db").write_text("")
    assert zipfile.ZipFile(io.BytesIO(code_archive.pack(tmp_path))).namelist() == ["train.py"]


def test_only_folders_of_old_runs_are_removed(tmp_path: Path) -> None:
    now = time.time()
    old, used, new = (run_folders.make(tmp_path, name, now) for name in ("old", "used", "new"))
    other = tmp_path / "somebody-elses"
    other.mkdir()
    for folder in (old, used, other):
        (folder / "output.log").write_text("")
        os.utime(folder, (now - 31 * DAY_S, now - 31 * DAY_S))
    with use_locks.held(used):
        run_folders.remove_old(tmp_path, now)
        assert not old.exists()
        assert used.exists() and new.exists() and other.exists()
    run_folders.remove_old(tmp_path, now)
    assert not used.exists()
