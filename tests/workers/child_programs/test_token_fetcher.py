"""The fetching process, without a zygote: how it ends, and what it leaves for the ranks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.memory.certificates import certified, new_authority
from tests.support.nodes.agent_config import agent_config
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.child_programs import token_fetcher
from holdfast_workers.data import fetch_plan
from holdfast_workers.data.token_cache import reported_trouble, shard_file
from holdfast_workers.data.token_order import SourceShards, TokenOrder
from holdfast_workers.fault_injection.failing_storage import FAULT_FILE
from holdfast_workers.fault_injection.kinds import FaultKind
from holdfast_workers.ipc import control_channel
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.protocol.messages import Partner
from holdfast_workers.protocol.processes import FetcherJob, FetchOrder
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec
from holdfast_workers.token_sets.node_fetch import Pauses, fetch

SECRET = b"s" * 32
MADE = MadeSet("web", random_shards(1, [30, 40, 50]))


@contextmanager
def fetcher(root: Path, cache: Path, *prepared: PreparedSpec) -> Iterator[Future[int]]:
    """The exit code; the agent is gone at the end of the block."""
    with talking_fetcher(root, cache, *prepared) as (code, _):
        yield code


@contextmanager
def talking_fetcher(
    root: Path, cache: Path, *prepared: PreparedSpec, job: FetcherJob | None = None, **data: Any
) -> Iterator[tuple[Future[int], socket.socket]]:
    """The exit code, and the agent's end of the socket."""
    job = job or FetcherJob(str(cache), FetchOrder(), "n0", SECRET)
    training = TrainingSpec(data=DataSpec(prepared=prepared, **data))
    config = agent_config(root, training=training).storage_zygote_config
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ThreadPoolExecutor(1) as pool, own:
        try:
            yield pool.submit(token_fetcher.run, own, job, config), agent
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


def test_it_brings_the_groups_that_its_agent_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_plan, "LEAST_HELD_BYTES", 0)
    many = MadeSet("many", random_shards(3, [600] * 40))
    prepared, cache = many.store(tmp_path / "store"), tmp_path / "cache"
    limit = len(many.facts.encode()) + 40 * many.shards[0].nbytes - 1
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    training = TrainingSpec()
    sizes = [SourceShards([600] * 40, [shard.nbytes for shard in many.shards])]
    order = TokenOrder(sizes, None, training.model.sequence_length, training.train.seed, 1)
    with talking_fetcher(tmp_path, cache, prepared, shuffle_gb=1e-9) as (_, agent):
        for window in (0, 400, 3):
            control_channel.send(agent, FetchOrder(window))
            start = window * training.train.global_batch
            groups = order.groups_between(start, start + training.train.global_batch)
            numbers = {number for group in groups for number in group.shards}
            assert len(numbers) < 40
            for number in numbers:
                eventually(shard_file(cache, many.shards[number]).exists)


def test_a_storage_that_stops_answering_is_asked_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, cache = MADE.store(tmp_path / "store"), tmp_path / "cache"
    pauses = Pauses(retries_s=(0.0,), round_s=0.02, look_s=0.02)
    monkeypatch.setattr(token_fetcher, "fetch", partial(fetch, pauses=pauses))
    with fetcher(tmp_path, cache, prepared) as code:
        paths = [shard_file(cache, shard) for shard in MADE.shards]
        eventually(lambda: all(path.exists() for path in paths))
        request = {"kind": FaultKind.REMOTE_DOWN, "until": time.time() + 3600.0}
        (tmp_path / FAULT_FILE).write_text(json.dumps(request))
        paths[1].unlink()
        eventually(lambda: "injected" in reported_trouble(cache, prepared))
        assert not paths[1].exists()
        (tmp_path / FAULT_FILE).unlink()
        eventually(paths[1].exists)
        eventually(lambda: reported_trouble(cache, prepared) == "")
        assert not code.done()


def test_it_has_files_from_other_nodes_over_tls(tmp_path: Path) -> None:
    """The store has none."""
    authority, cache = new_authority(), tmp_path / "cache"
    folders = [certified(tmp_path / f"tls{n}", authority) for n in range(2)]
    prepared = MADE.put_into_cache(tmp_path / "other")
    memory, tls = SegmentStore(tmp_path / "memory", "tp=1"), PeerTls(folders[0])
    other = DataServer(memory, SECRET, "127.0.0.1", tls=tls, cache_dir=tmp_path / "other")
    caches = (Partner("n0", "127.0.0.1", 1), Partner("n1", "127.0.0.1", other.port))
    job = FetcherJob(str(cache), FetchOrder(caches=caches), "n0", SECRET, str(folders[1]))
    with closing(other), talking_fetcher(tmp_path, cache, prepared, job=job):
        eventually(lambda: all(shard_file(cache, shard).exists() for shard in MADE.shards))
