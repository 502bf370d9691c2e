"""The fetching process, without a zygote: how it ends, and what it leaves for the ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.child_programs import token_fetcher
from holdfast_workers.data.token_cache import reported_trouble, shard_file
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.protocol.processes import FetcherJob
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec

MADE = MadeSet("web", random_shards(1, [30, 40, 50]))


@contextmanager
def fetcher(root: Path, cache: Path, *prepared: PreparedSpec) -> Iterator[Future[int]]:
    """The exit code; the agent is gone at the end of the block."""
    training = TrainingSpec(data=DataSpec(prepared=prepared))
    config = agent_config(root, training=training).storage_zygote_config
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ThreadPoolExecutor(1) as pool, own:
        try:
            yield pool.submit(token_fetcher.run, own, FetcherJob(str(cache)), config)
        finally:
            agent.close()


def test_it_opens_a_store_once_and_ends_with_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, cache = MADE.store(tmp_path / "store"), tmp_path / "cache"
    opened: list[str] = []

    def counted(uri: str, options: object) -> Storage:
        opened.append(uri)
        return open_storage(uri)

    monkeypatch.setattr(token_fetcher, "open_storage", counted)
    with fetcher(tmp_path, cache, prepared) as code:
        eventually(lambda: all(shard_file(cache, shard).exists() for shard in MADE.shards))
        assert not code.done()
    assert code.result(DEADLINE_S) == 0
    assert opened == [prepared.uri]


@pytest.mark.parametrize("what", ["limit", "cache", "set"])
def test_each_failure_leaves_its_reason_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(token_fetcher, "AGAIN_AFTER_S", 0.0)
    cache, made, reason = tmp_path / "cache", MADE, "'many' is not a number of GB"
    cache.mkdir()
    if what == "limit":
        monkeypatch.setenv(LIMIT_VARIABLE, "many")
    elif what == "cache":  # where the report has no place either
        cache, reason = tmp_path / "file" / "cache", ""
        cache.parent.write_text("")
    else:
        made, reason = MadeSet("short", [[1]]), "each shard at least two tokens"
    prepared = made.store(tmp_path / "store")
    with fetcher(tmp_path, cache, prepared) as code:
        assert code.result(DEADLINE_S) == 1
    assert reason in reported_trouble(cache, prepared)


def test_after_a_failure_it_ends_with_its_agent_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    monkeypatch.setattr(token_fetcher, "AGAIN_AFTER_S", 3600.0)
    prepared, cache = MADE.store(tmp_path / "store"), tmp_path / "cache"
    cache.mkdir()
    with fetcher(tmp_path, cache, prepared) as code:
        eventually(lambda: reported_trouble(cache, prepared) != "")
    assert code.result(DEADLINE_S) == 0
