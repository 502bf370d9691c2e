"""Which variables of a node, and of the server, other processes get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.ipc import environment

SECRETS = {
    "HOLDFAST_DATABASE_URL": "postgresql://holdfast:word@db/holdfast",
    "HOLDFAST_WEBHOOK_SECRET": "word",
    "HOLDFAST_TOKEN": "word",
    "RAY_AUTH_TOKEN_PATH": "/data/cluster/token",
    "AWS_SECRET_ACCESS_KEY": "word",
    "HTTPS_PROXY": "http://me:word@proxy",
    "HF_TOKEN": "word",
    "NVIDIA_API_KEY": "word",
    "DATABASE_PASSWORD": "word",
}
NEEDED = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": "/code",
    "LD_LIBRARY_PATH": "/lib",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    "HOLDFAST_CLUSTER_ID": "1234",
}


def test_users_code_gets_what_programs_need_and_no_secret() -> None:
    limit = {"HOLDFAST_CACHE_LIMIT_GB": "20"}
    assert environment.for_users_code(NEEDED | SECRETS | limit) == NEEDED | limit


def test_users_breakpoints_are_not_those_of_rays_debugger() -> None:
    set_by_ray = {"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    assert environment.for_users_code(NEEDED | set_by_ray) == NEEDED
    assert environment.for_nodes(NEEDED | set_by_ray) == NEEDED


def test_users_code_gets_what_the_operator_names() -> None:
    named = {environment.PASSED_ON_VARIABLE: " HF_TOKEN,MY_*,,", "MY_CACHE": "/cache"}
    found = environment.for_users_code(NEEDED | SECRETS | named)
    assert found == NEEDED | {"HF_TOKEN": "word", "MY_CACHE": "/cache"}


def test_nodes_get_access_to_buckets_and_their_own_settings_but_not_the_servers() -> None:
    settings = {"HOLDFAST_NODE_LOGS": "json", "HOLDFAST_TLS_DIR": "/tls", "RAY_USE_TLS": "1"}
    settings |= {"RAY_TLS_SERVER_CERT": "/tls/ray.crt", environment.PASSED_ON_VARIABLE: "HF_TOKEN"}
    found = environment.for_nodes(NEEDED | SECRETS | settings)
    expected = ("AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "HF_TOKEN")
    assert found == NEEDED | settings | {name: SECRETS[name] for name in expected}


def test_processes_with_access_to_a_bucket_find_no_users_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "code")
    paths = os.pathsep.join((str(tmp_path / "link"), "/holdfast", ""))
    found = environment.for_storage(
        NEEDED | SECRETS | {"PYTHONPATH": paths}, str(tmp_path / "code")
    )
    expected = {"AWS_SECRET_ACCESS_KEY": "word", "HTTPS_PROXY": SECRETS["HTTPS_PROXY"]}
    assert found == NEEDED | expected | {"PYTHONPATH": "/holdfast", "PYTHONSAFEPATH": "1"}


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_nothing_is_invented_or_changed(given_: dict[str, str]) -> None:
    assert environment.for_users_code(given_).items() <= given_.items()
    assert environment.for_users_code(given_).items() <= environment.for_nodes(given_).items()


@pytest.mark.parametrize("name", ["HOLDFAST_TOKEN", "RAY_ADDRESS", "PYTHONPATH"])
def test_variables_of_holdfast_itself_are_reserved(name: str) -> None:
    assert environment.is_reserved(name)
    assert not environment.is_reserved(f"MY_{name}")
