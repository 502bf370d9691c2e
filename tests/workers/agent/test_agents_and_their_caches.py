"""An agent serves the token sets of its cache, and learns from its orders whose it may use."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes import own_processes
from tests.support.nodes.agent_config import agent_config
from tests.support.nodes.local_agents import LocalAgents
from tests.support.nodes.supervised import small_training
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_workers.agent.agent_config import join_order
from holdfast_workers.data.token_cache import manifest_file, shard_file
from holdfast_workers.memory.cache_transfer import NotCached, RemoteCache
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.node_cache.cached_file import make_room
from holdfast_workers.protocol.answers import AgentReport, Done
from holdfast_workers.protocol.commands import Command, Fence, Form, Request, WarmUp
from holdfast_workers.protocol.messages import FormOrder, Partner, Restore, Seat, Tier
from holdfast_workers.spec import DataSpec, ParallelSpec, TrainingSpec

MADE = MadeSet("web", random_shards(1, [500, 600, 700]))


def training(*sets: MadeSet) -> TrainingSpec:
    data = DataSpec(prepared=tuple(made.prepared() for made in sets))
    return small_training(parallel=ParallelSpec(), data=data)


def node_with(folder: Path, secret: bytes, number: int) -> DataServer:
    """Another node, with this shard of the set in its cache, and the manifest."""
    MADE.put_into_cache(folder)
    for shard in {*MADE.shards} - {MADE.shards[number]}:
        shard_file(folder, shard).unlink()
    memory = SegmentStore(folder / "memory", "tp=1")
    return DataServer(memory, secret, "127.0.0.1", cache_dir=folder)


def test_its_orders_name_the_nodes_to_fetch_from(tmp_path: Path) -> None:
    """The store has nothing at all. The first order comes before the agent is ready: its zygote
    waits for the manifest."""
    spec = training(MADE)
    dump, mesh = spec.model_dump(mode="json"), spec.parallel.mesh
    with closing(LocalAgents(1, dump, mesh, 1, tmp_path / "checkpoints")) as agents:
        servers = [node_with(tmp_path / str(n), agents.secret, n) for n in range(3)]
        agents.ensure()
        cache = Path(agents.agents["n0"].config.cache_dir)
        eventually(lambda: agents.report("n0").data_port)

        def order(number: int, command: Command, answer: type) -> None:
            path = shard_file(cache, MADE.shards[number])
            assert not path.exists()
            agents.call("n0", Request(command, 1), answer, timeout_s=DEADLINE_S).result()
            eventually(path.exists)

        caches = [(Partner("n1", "127.0.0.1", server.port),) for server in servers]
        order(0, Fence("n0", 1, caches=caches[0]), AgentReport)
        eventually(lambda: agents.report("n0").ready)
        order(1, WarmUp("n0", 1, caches=caches[1]), Done)
        port, seat = agents.report("n0").store_port, Seat(0, None, Restore(Tier.INIT, 0))
        form = FormOrder(2, mesh, 1, "127.0.0.1", port, (seat,), caches=caches[2])
        order(2, Form("n0", form), Done)
        own = RemoteCache(agents.secret, Partner("n0", "127.0.0.1", agents.report("n0").data_port))
        names = {shard_file(cache, shard).name for shard in MADE.shards}
        names.add(manifest_file(cache, MADE.prepared()).name)
        assert own.which(sorted(names)) == names
        own.close()
        for command, answer in ((Fence("n0", 3), AgentReport), (WarmUp("n0", 3), Done)):
            agents.call("n0", Request(command, 1), answer, timeout_s=DEADLINE_S).result()
        for worker in own_processes.named("hf-worker"):  # their mapped shards stay in use
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        nbytes = len(MADE.facts.encode())
        eventually(lambda: make_room(cache, 0) == nbytes)  # and others of a standby do not
        for server in servers:
            server.close()


def test_an_agent_without_token_sets_serves_no_cache(tmp_path: Path) -> None:
    spec = training()
    dump, mesh = spec.model_dump(mode="json"), spec.parallel.mesh
    with closing(LocalAgents(1, dump, mesh, 1, tmp_path / "checkpoints")) as agents:
        agents.ensure()
        eventually(lambda: agents.report("n0").data_port)
        cache = Path(agents.agents["n0"].config.cache_dir)
        MADE.put_into_cache(cache)
        own = RemoteCache(agents.secret, Partner("n0", "127.0.0.1", agents.report("n0").data_port))
        name = shard_file(cache, MADE.shards[0]).name
        assert own.which([name]) == set()
        with pytest.raises(NotCached), own.open(name):
            pass
        own.close()


def test_a_worker_is_not_given_the_addresses_of_nodes(tmp_path: Path) -> None:
    seat = Seat(0, None, Restore(Tier.INIT, 0))
    caches = (Partner("n1", "127.0.0.1", 1),)
    order = FormOrder(2, {"dp_shard": 1}, 1, "127.0.0.1", 1, (seat,), caches=caches)
    assert join_order(order, seat, tmp_path).form.caches == ()
    assert agent_config(tmp_path, training=training(MADE)).reads_token_sets
