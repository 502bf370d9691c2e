"""A complete control plane over an in-memory cluster, on a real port, for tests of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from tests.support.service.databases import QUICK, fast_settings, migrated_file
from tests.support.service.fake_cluster import FakeCluster, FakeSupervisor
from tests.support.waiting import DEADLINE_S, eventually

from holdfast.rest.app import create_app
from holdfast.rest.connections import server_config
from holdfast.rest.limits import ConnectionLimits
from holdfast.rest.serve import bound
from holdfast.rest.services import services_over
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.store.engine import Store

SPEC: dict[str, Any] = {
    "name": "tiny",
    "train": {"steps": 5, "schedule": {"name": "constant", "warmup_steps": 0}},
    "parallel": {"dp_shard": 2, "tp": 2},
    "resources": {"workers_per_node": 2, "standby_nodes": 1},
}

RARER_LOOKS = replace(
    QUICK, reconcile_interval_s=0.1, claim_interval_s=0.1, node_look_s=0.25, reap_interval_s=0.5
)
"""An idle server takes an eighth of a core with these, and half a core with `fast_settings`."""


class LiveServer:
    """Runs in its own thread; can be restarted on the same port and database."""

    def __init__(
        self,
        data_dir: Path,
        allow_fault_injection: bool = True,
        connections: ConnectionLimits | None = None,
        **services: Any,
    ) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        if not (data_dir / "holdfast.db").exists():
            (data_dir / "holdfast.db").write_bytes(migrated_file())
        self.settings = fast_settings(
            data_dir, allow_fault_injection=allow_fault_injection, pace=RARER_LOOKS
        )
        self.cluster = FakeCluster()
        self._connections = connections
        self._changes = services
        self._port = 0
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def store(self) -> Store:
        """That of the running server."""
        return self._services.fleet.store

    def start(self) -> None:
        self._listener = bound(self.settings.model_copy(update={"port": self._port}))
        self._port = self._listener.getsockname()[1]
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(DEADLINE_S), "the server did not start"

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._services.stopping.set)
            self._thread.join(DEADLINE_S)
            assert not self._thread.is_alive(), "the server did not stop"
            self._thread = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """It does nothing meanwhile: what a client sends is there when it goes on."""
        at_rest, proceed = threading.Event(), threading.Event()

        def rest() -> None:
            at_rest.set()
            proceed.wait(DEADLINE_S)

        self._loop.call_soon_threadsafe(rest)
        assert at_rest.wait(DEADLINE_S)
        try:
            yield
        finally:
            proceed.set()

    def supervisor(self, job_id: str, within_s: float = DEADLINE_S) -> FakeSupervisor:
        """The job's supervisor, once the reconciler has asked for it."""
        eventually(lambda: job_id in self.cluster.supervisors, within_s)
        return self.cluster.supervisors[job_id]

    def run_job(self, job_id: str, steps: int = 5, *, end: bool = True) -> FakeSupervisor:
        """Let a job form its first attempt and make `steps` steps; with `end`, it succeeds."""
        supervisor = self.supervisor(job_id)
        supervisor.train(steps)
        if end:
            supervisor.end()
        return supervisor

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        store = await Store.open(self.settings)
        base = replace(
            services_over(store, self.cluster, self.settings),
            allowed_hosts=frozenset({"127.0.0.1", "localhost"}),
        )
        self._services = replace(base, **self._changes, stopping=asyncio.Event())
        config = server_config(create_app(self._services), self._connections)
        server = uvicorn.Server(config)
        driving = asyncio.create_task(
            Reconciler(store, self.cluster, self.settings).run(self._services.stopping)
        )
        operations = asyncio.create_task(self._services.operation_runner.run())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        self._up.set()  # the port is open: early connections wait for the application
        await self._services.stopping.wait()
        server.should_exit = True
        await serving
        # As at the end of a process: a client would keep a connection that is left open, and wait.
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()
        await driving
        operations.cancel()
        await asyncio.gather(operations, return_exceptions=True)
        await store.close()


@contextlib.contextmanager
def live_server(
    data_dir: Path, changed_settings: Mapping[str, Any] | None = None, **services: Any
) -> Iterator[LiveServer]:
    server = LiveServer(data_dir, **services)
    server.settings = server.settings.model_copy(update=changed_settings or {})
    server.start()
    try:
        yield server
    finally:
        server.stop()
