"""A machine room with a cluster that `holdfast cluster` made, and a server on its head."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine_room.host import HOME, Host, HostProcess
from tests.support.machine_room.room import MachineRoom
from tests.support.machine_room.services import Services
from tests.support.nodes import namespaces
from tests.support.waiting import eventually

from holdfast import Client

COMMAND_S = 150.0
READY_S = 60.0
PORT = 8642
STORE = "s3://checkpoints/jobs"
TOKEN = f"{HOME}/.holdfast/node/token"
CERTIFICATES = f"{HOME}/.holdfast/node/tls"
JOIN = "holdfast cluster join head --token-file token"
HEAD, SERVICES = "head", "services"


def require_room() -> None:
    """Skip the test where no room can be made; where `HOLDFAST_NO_SKIPS` is set (CI), fail."""
    if not (why := namespaces.why_not()):
        return
    if os.environ.get("HOLDFAST_NO_SKIPS"):
        pytest.fail(f"no machine room: {why}")
    pytest.skip(f"no machine room: {why}")


class TrainingRoom:
    """`nodes`: names of the hosts that may join. The hosts `head` and `services` are there too."""

    def __init__(self, room: MachineRoom) -> None:
        self.room = room
        self.services = Services(room[SERVICES])
        self.client: Client
        self.server: HostProcess

    @property
    def head(self) -> Host:
        return self.room[HEAD]

    def up(self, options: str = "--no-training") -> None:
        self.head.run(f"holdfast cluster up --head {options}", timeout_s=COMMAND_S)

    def copy_token(self, name: str) -> None:
        """As a user would, to the home of another host."""
        self.room[name].write(f"{HOME}/token", self.head.read(TOKEN))

    def copy_certificates(self, name: str) -> None:
        """The same, of the folder that `up --tls` made; the certificate last, as documented."""
        for file in ("ca.crt", "tls.key", "tls.crt"):
            self.room[name].write(f"{HOME}/tls/{file}", self.head.read(f"{CERTIFICATES}/{file}"))

    def join(self, *names: str, options: str = "--cpus 1") -> None:
        """Several hosts at the same time."""

        def join(name: str) -> None:
            self.copy_token(name)
            self.room[name].run(f"{JOIN} {options}", timeout_s=COMMAND_S)

        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(join, names))

    def serve(self, options: str = "", **variables: str) -> Client:
        """Start a server of the cluster that `up` made, with the database of the services."""
        database = f"--database-url {self.services.database_url}"
        return self.serve_any(f"--ray-token-file {TOKEN} {database} {options}", **variables)

    def serve_any(self, options: str, **variables: str) -> Client:
        """Start a server on the head, with the bucket of the services, for any Ray cluster."""
        secret = json.dumps(self.services.secret())
        self.head.write(f"{HOME}/.holdfast/secrets/bucket.json", secret)
        self.server = self.head.start(
            f"exec holdfast serve --ray-address {self.head.address}:6379 "
            f"--host {self.head.address} --port {PORT} --expose-without-authentication "
            f"--store-uri {STORE} --store-endpoint {self.services.endpoint} "
            f"--store-secret bucket --json {options}",
            **variables,
        )
        eventually(
            lambda: '"address"' in self.server.output() or self.server.status is not None, READY_S
        )
        assert self.server.status is None, self.server.output()
        self.client = Client(f"http://{self.head.address}:{PORT}", retry_s=60)
        self.client.ready()
        return self.client

    def spec(self, steps: int = 120, **changes: Any) -> dict[str, Any]:
        """A job of two ranks on two nodes with a standby."""
        return {
            "name": "room-lm",
            "model": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "sequence_length": 64},
            "train": {"steps": steps, "global_batch": 8, "micro_batch": 2},
            "parallel": {"dp_shard": 2},
            "resources": {"cpus_per_worker": 1, "workers_per_node": 1, "standby_nodes": 1},
            "checkpoint": {
                "memory": {"every_steps": 1},
                "remote": {"every_steps": 50, "keep": 2},
            },
            "recovery": {"wait_for_replacement_s": 60},
            **changes,
        }

    def hosts_of(self, job_id: str) -> dict[int, str]:
        """The name of each rank's host in the newest attempt."""
        names = {self.room.address(name): name for name in self.room.names}
        return {m.rank: names[m.host] for m in self.client.attempts(job_id)[-1].members}


@contextmanager
def training_room(logs: Path, nodes: list[str], **options: Any) -> Iterator[TrainingRoom]:
    """A room with its services started; nothing else runs."""
    require_room()
    with MachineRoom([HEAD, *nodes, SERVICES], logs, **options) as room:
        started = TrainingRoom(room)
        started.services.start_postgres()
        started.services.start_s3()
        yield started
