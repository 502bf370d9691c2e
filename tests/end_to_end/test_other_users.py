"""A second user of the machine gets at nothing of a server with running jobs, and sees no secret
in the arguments of any process."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.end_to_end.conftest import ONE_NODE, PLANTED, REPOSITORY, Product, spec
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.other_users import nobody
from tests.support.other_users.probe import DATA, RAYS_CALLS, exchange, frames, request

from holdfast_service.embedded_cluster import processes
from holdfast_service.embedded_cluster.local_cluster import LocalCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user"),
]
BUCKET_KEY = secrets.token_hex(16)


@dataclass(frozen=True)
class RunningJobs:
    """A recipe whose checkpoints are in a bucket, and a script with a code package. `arguments`: of
    all processes of the machine that were seen meanwhile."""

    product: Product
    ids: tuple[str, ...]
    arguments: set[bytes] = field(default_factory=set)

    @property
    def folders(self) -> list[Path]:
        cluster = self.product.cluster
        return [self.product.data_dir, Path(cluster.temp_dir), Path(cluster.shm_root)]

    def processes(self) -> list[int]:
        """Of server, keeper and cluster."""
        cluster, server = self.product.cluster, self.product.process
        assert server is not None
        return [server.pid, cluster.keeper_pid, *processes.of_cluster(cluster.cluster_id)]

    def see_arguments(self) -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                self.arguments.add(file.read_bytes())


@pytest.fixture(scope="module")
def jobs(product: Product) -> Iterator[RunningJobs]:
    s3 = S3Server()
    try:
        bucket = s3.new_bucket()
        key = {**CREDENTIALS, "secret_access_key": BUCKET_KEY}
        secret = product.data_dir / "secrets" / "bucket.json"
        secret.parent.mkdir(mode=0o700)
        secret.write_text(json.dumps({**key, "bucket": bucket, "endpoint": s3.endpoint}))
        secret.chmod(0o600)
        remote = {"uri": f"s3://{bucket}/runs", "endpoint": s3.endpoint, "secret": secret.stem}
        running = started(product, {**remote, "every_steps": 20})
        yield running
        for job in running.ids:
            product.client.cancel(job)
            product.finish(job)
    finally:
        s3.close()


def started(product: Product, remote: dict[str, object]) -> RunningJobs:
    recipe = spec(
        **ONE_NODE,
        train={**spec()["train"], "steps": 100_000},
        checkpoint={"memory": {"every_steps": 1}, "remote": remote},
    )
    script = {
        "name": "ddp",
        "script": "ddp.py --steps 100000 --pause 0.05",
        "code": str(REPOSITORY / "examples" / "bring"),
        "program": {"metrics": "step (?P<step>[0-9]+)"},
        "parallel": {"dp_replicate": 2},
        "resources": ONE_NODE["resources"],
    }
    client = product.client
    first = client.submit(script).id
    product.wait_step(first, 1)  # the other one leaves little time for its start
    jobs = RunningJobs(product, (first, client.submit(recipe).id))

    def has_saved() -> bool:
        jobs.see_arguments()
        return bool(client.checkpoints(jobs.ids[1]).items)

    product.wait(has_saved, 120)
    return jobs


def test_no_argument_of_any_process_shows_a_secret(jobs: RunningJobs) -> None:
    key = (jobs.product.data_dir / "job-secrets.key").read_bytes()
    keys = [key, *(hmac.digest(key, job.encode(), "sha256") for job in jobs.ids)]
    ray = Path(jobs.product.cluster.token_path).read_text().strip()
    own = json.loads((jobs.product.data_dir / "server.json").read_text())["token"]
    forbidden = [*keys, *(key.hex().encode() for key in keys)]
    forbidden += [word.encode() for word in (ray, own, BUCKET_KEY, PLANTED)]
    assert any(b"holdfast_service.embedded_cluster.keeper" in line for line in jobs.arguments)
    assert not [line for line in jobs.arguments if any(word in line for word in forbidden)]


def test_another_user_of_the_machine_reads_and_writes_nothing(
    jobs: RunningJobs, tmp_path: Path
) -> None:
    client, running = jobs.product.client, jobs.processes()
    ports, abstract = nobody.listening_ports(running), nobody.abstract_sockets()
    api = int(client.address.rpartition(":")[2])
    assert abstract and len(ports) > 10
    with nobody.reachable(*jobs.folders, tmp_path / "open"):
        assert_the_probe_finds_what_is_open(tmp_path)
        found = nobody.got_at(
            roots=[*jobs.folders, *nobody.written_outside(running, jobs.folders)],
            abstract=abstract,
            ports=[port for port in ports if port != api],
            api=api,
            processes=running,
        )
    assert not found
    assert_ray_answers_with_its_token(jobs.product.cluster, ports)
    assert all(client.get(job).outcome is None for job in jobs.ids)


def assert_the_probe_finds_what_is_open(folder: Path) -> None:
    opened = folder / "open"
    opened.mkdir()
    (opened / "file").write_text("x")
    opened.chmod(0o777)
    (opened / "file").chmod(0o666)
    found = nobody.got_at(roots=[opened], processes=[os.getpid()])
    assert f"listed {opened}" in found and f"planted a file in {opened}" in found
    assert {f"{what} {opened / 'file'}" for what in ("read", "renamed")} <= {*found}
    assert f"opened {opened / 'file'} for writing" in found


def assert_ray_answers_with_its_token(cluster: LocalCluster, ports: list[int]) -> None:
    """Otherwise the calls of the probe show nothing."""
    gcs, token = int(cluster.address.rpartition(":")[2]), Path(cluster.token_path).read_text()
    assert gcs in ports
    assert DATA in frames(exchange(gcs, request(RAYS_CALLS[0], gcs, token.strip())))
