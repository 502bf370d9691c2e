"""The zygote whose processes reach a bucket: a real one, beside a hostile folder of users' code."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.ipc import environment
from holdfast_workers.ipc.children import ChildProcesses

pytestmark = pytest.mark.chaos
START_S = 120.0


def test_it_starts_without_a_module_of_the_code_package_and_without_the_jobs_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code package is the working folder and first in PYTHONPATH, as Ray sets it up."""
    code = tmp_path / "code"
    code.mkdir()
    for module in ("botocore", "json", "structlog", "holdfast_workers"):
        (code / f"{module}.py").write_text("raise RuntimeError('a module of the user')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(code), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("DATABASE_PASSWORD", "planted-word")
    monkeypatch.setenv("AWS_PROFILE", "of-the-node")
    monkeypatch.chdir(code)
    config = agent_config(tmp_path, remote_root="s3://bucket/x", job_env={"AWS_PROFILE": "users"})
    variables = partial(environment.for_storage, code=str(code))
    processes = ChildProcesses(config.storage_zygote_config, START_S, START_S, variables=variables)
    try:
        processes.start()
        environ = Path(f"/proc/{processes.pid}/environ").read_bytes()
        threads = [*Path(f"/proc/{processes.pid}/task").iterdir()]
    finally:
        processes.stop()
    assert len(threads) == 1  # with more it could not be forked
    assert b"AWS_PROFILE=of-the-node" in environ
    assert b"planted-word" not in environ
    assert str(code).encode() not in environ
