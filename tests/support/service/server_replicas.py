"""Several API servers of one database behind a load balancer, as processes that tests kill.

Run as a program, this module is one of them, over the cluster in a folder (`durable_cluster`):
`python -m tests.support.service.server_replicas <settings as JSON> <folder>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import uvicorn
from tests.support.service.balancer import Balancer
from tests.support.service.durable_cluster import DurableCluster
from tests.support.service.ray_processes import free_port
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.rest.app import create_app
from holdfast.rest.connections import server_config
from holdfast.rest.services import services_over
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store

START_S = 60.0


class Replicas:
    """The servers with the numbers 0, 1, ..."""

    def __init__(self, count: int, command: Callable[[int], Sequence[str]], log: Path) -> None:
        """`command(port)`: the program of a server."""
        self._ports = [free_port() for _ in range(count)]
        self._command = command
        self._log = log
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.balancer = Balancer(self._ports)
        self.client = Client(self.balancer.address, retry_s=60)

    def start(self, number: int) -> None:
        with self._log.open("a") as log:
            self._processes[number] = subprocess.Popen(
                self._command(self._ports[number]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def wait_started(self, number: int) -> None:
        eventually(lambda: self._answers(number), START_S, lambda: self._log.read_text()[-3000:])

    def kill(self, number: int) -> None:
        process = self._processes[number]
        process.kill()
        process.wait()

    def close(self) -> None:
        self.client.close()
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
        self.balancer.close()

    def _answers(self, number: int) -> bool:
        with contextlib.suppress(httpx.TransportError):
            address = f"http://127.0.0.1:{self._ports[number]}/healthz"
            return httpx.get(address, timeout=5.0).status_code == 200
        return False


@contextlib.contextmanager
def replicas(command: Callable[[int], Sequence[str]], log: Path) -> Iterator[Replicas]:
    """Two started servers."""
    servers = Replicas(2, command, log)
    try:
        for number in range(2):
            servers.start(number)
        for number in range(2):
            servers.wait_started(number)
        yield servers
    finally:
        servers.close()


class Follower:
    """Follows the events of a job to its end, through whichever servers live."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.numbers: list[int] = []
        self._client, self._job = client, job_id
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for event in self._client.follow(self._job):
            self.numbers.append(event.seq)

    def wait(self, within_s: float) -> list[int]:
        """The numbers of all events, in the order in which they came."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"the events of {self._job} did not end"
        return self.numbers


async def _serve(settings: Settings, folder: Path) -> None:
    store = await Store.open(settings)
    cluster = DurableCluster(folder)
    reconciler = Reconciler(store, cluster, settings)
    services = replace(
        services_over(store, cluster, settings, reconciler.wake, reconciler.wake_for_nodes),
        allowed_hosts=frozenset({"127.0.0.1"}),
        stopping=asyncio.Event(),
    )
    driving = asyncio.create_task(reconciler.run(services.stopping))
    await uvicorn.Server(server_config(create_app(services), port=settings.port)).serve()
    services.stopping.set()
    await driving
    await store.close()


if __name__ == "__main__":
    asyncio.run(_serve(Settings.model_validate_json(sys.argv[1]), Path(sys.argv[2])))
