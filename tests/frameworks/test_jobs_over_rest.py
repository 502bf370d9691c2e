"""Jobs over REST, on real raylets: a framework that pip installs for the job, a Ray Train function,
and a script with the context. A rank is killed, then a node is lost; no step's loss changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Product, served

from holdfast_service.embedded_cluster import local_cluster

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 60
ENDED_S = 300.0


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("product")) as started:
        yield started


def lightning(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "bring"),
        "script": f"lightning_fit.py --steps {STEPS} --pause 0.1 --folder {folder}",
        "program": {"preload": ["pytorch_lightning"]},
        "runtime_env": {"pip": ["pytorch-lightning==2.6.6"]},
    }


def ray_train(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "ray_train"),
        "ray_train": "train:train_loop_per_worker",
        "config": {"lr": 0.02, "epochs": 8 * STEPS},  # of 20 ms
        "ray_run": {"storage_path": str(folder)},
        "checkpoint": {"memory": {"every_steps": 1}},
    }


def with_context(folder: Path) -> dict[str, Any]:
    return {
        "code": str(EXAMPLES / "bring"),
        "script": "context.py --pause 0.1",
        "program": {"context": True},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2},
    }


@pytest.mark.parametrize("job_of", [lightning, ray_train, with_context])
def test_losses_are_the_same_after_a_kill_and_a_lost_node(
    product: Product, tmp_path: Path, job_of: Any
) -> None:
    client = product.client
    losses: list[dict[int, Any]] = []
    for disturbed in (False, True):
        document = {
            **job_of(tmp_path / f"saved-{disturbed}"),
            "name": f"{job_of.__name__}-{disturbed}".replace("_", "-"),
            "parallel": {"dp_shard": 2},
            "resources": {"cpus_per_worker": 0.5, "workers_per_node": 1, "standby_nodes": 1},
        }
        job = client.submit(document)
        if disturbed:
            product.wait_step(job.id, 12, ENDED_S)
            product.kill_rank(job.id, 1)
            wait_recovered(product, job.id)
            product.wait_step(job.id, 30, ENDED_S)
            lost = product.members(job.id)[1].node_id
            local_cluster.kill_node(product.cluster, lost)
            wait_second_incident(product, job.id)
            local_cluster.add_node(product.cluster)
        ended = product.finish(job.id, ENDED_S)
        assert ended.state == "SUCCEEDED", (ended.outcome, client.logs(job.id, limit=50).items)
        assert ended.progress.incidents == (2 if disturbed else 0)
        rows = client.metrics(job.id, ["loss"])
        losses.append({point.step: point.values["loss"] for point in rows})
    assert len(losses[0]) >= STEPS and losses[1] == losses[0]


def wait_recovered(product: Product, job_id: str) -> None:
    """A node that is lost before would belong to the first incident."""

    def is_recovered() -> bool:
        job = product.client.get(job_id)
        return (job.state, job.progress.attempt) == ("RUNNING", 2)

    product.wait(is_recovered)


def wait_second_incident(product: Product, job_id: str) -> None:
    product.wait(lambda: len(product.client.incidents(job_id)) == 2)
