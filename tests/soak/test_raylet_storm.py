"""Raylets are killed and started at random under a running server, with several jobs at once.

Elastic and fixed jobs shrink, grow, wait and are queued again; all of them succeed in the end, each
sample exactly once, and nothing of them is left on the cluster.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.end_to_end.conftest import Product, served, spec

from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.views.jobs import JobView

pytestmark = [
    *(pytest.mark.soak, pytest.mark.cluster, pytest.mark.chaos),
    pytest.mark.timeout(2 * 3600),
]
CHANGES = int(os.environ.get("HOLDFAST_TEST_CHANGES", "30"))
SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "17"))
STEPS = 300
FEWEST_NODES, MOST_NODES = 1, 4
LONGEST_PAUSE_S = 6.0
SIZES: tuple[dict[str, Any], ...] = (
    {"parallel": {"dp_shard": "auto"}, "nodes": {"min": 1, "max": 3}},
    {"parallel": {"dp_shard": "auto"}, "nodes": {"min": 2, "max": 4}},
    {"parallel": {"dp_shard": 1}},
    {"parallel": {"dp_shard": 2}},
)
"""Of the jobs that run at once; one that ends is followed by another like it."""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOLDFAST_QUARANTINE_INCIDENTS", "0")  # all nodes have many incidents
        with served(tmp_path_factory.mktemp("product")) as started:
            yield started


def submit(product: Product, kind: int, number: int) -> str:
    size = dict(SIZES[kind])
    nodes = {"nodes": size.pop("nodes")} if "nodes" in size else {}
    resources = {"cpus_per_worker": 0.25, "workers_per_node": 1, "standby_nodes": 0, **nodes}
    document = spec(name=f"storm-{kind}-{number}", resources=resources, **size)
    document["train"] = {**document["train"], "steps": STEPS, "global_batch": 12}
    document["recovery"] = {
        "max_failures": 100_000,
        "max_without_progress": 100_000,
        "wait_for_replacement_s": 5.0,
        "grow_after_s": 1.0,
    }
    return product.client.submit(document).id


def test_jobs_outlive_raylets_that_die_and_come_at_random(product: Product) -> None:
    rng, client = random.Random(SEED), product.client
    print(f"seed {SEED}, {CHANGES} changes")
    began, changes = time.monotonic(), Counter[str]()
    jobs = {submit(product, kind, 0): kind for kind in range(len(SIZES))}
    running = dict(jobs)
    product.wait(lambda: any((client.get(job).progress.step or 0) > 5 for job in running), 120.0)
    while changes.total() < CHANGES:
        changes[change_nodes(product, rng)] += 1
        time.sleep(rng.uniform(0.0, LONGEST_PAUSE_S))  # at any moment of what follows
        for job, kind in list(running.items()):
            if client.get(job).state.terminal:
                del running[job]
                running[another := submit(product, kind, len(jobs))] = kind
                jobs[another] = kind
    while len(there(product)) < MOST_NODES:
        start_node(product)
    ended = {job: product.finish(job, 1_200.0) for job in jobs}
    print(summary(product, ended, changes, time.monotonic() - began))
    assert {job: end.outcome for job, end in ended.items() if end.state != "SUCCEEDED"} == {}
    samples = [product.samples(job) for job in jobs]
    assert set(samples[0]) == set(range(1, STEPS + 1))
    assert all(each == samples[0] for each in samples), "all jobs read the same samples"
    for job in jobs:
        product.wait(lambda job=job: not product.left_of(job), 90.0)  # type: ignore[misc]
    assert groups_left(product) == []


def there(product: Product) -> list[str]:
    """The nodes of ranks: the head has none, and the server's connection to Ray needs it."""
    alive = {node.node_id for node in product.cluster.nodes if not node.head}
    return [node.id for node in product.client.nodes() if node.there and node.id in alive]


def change_nodes(product: Product, rng: random.Random) -> str:
    nodes = there(product)
    if len(nodes) >= MOST_NODES or (len(nodes) > FEWEST_NODES and rng.random() < 0.5):
        lost = rng.choice(sorted(nodes))
        local_cluster.kill_node(product.cluster, lost)
        product.wait(lambda: lost not in there(product), 60.0)
        return "killed"
    return "started" if start_node(product) else "not started"


def start_node(product: Product) -> bool:
    """False: Ray gave up on the new node, as it does where all processors are busy."""
    try:
        local_cluster.add_node(product.cluster)
    except local_cluster.LocalClusterError as error:
        print(error)
        return False
    return True


LIST_GROUPS = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
table = ray.util.placement_group_table().values()
print(json.dumps([group["name"] for group in table if group["state"] != "REMOVED"]))
"""


def groups_left(product: Product) -> list[str]:
    """The placement groups that remain on the cluster. In a process of its own: Ray reads the
    cluster's settings when it is imported."""
    listed = subprocess.run(
        [sys.executable, "-c", LIST_GROUPS, product.cluster.address],
        env={**os.environ, **product.cluster.environment()},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names: list[str] = json.loads(listed.stdout.splitlines()[-1])
    return names


def summary(
    product: Product, ended: dict[str, JobView], changes: Counter[str], passed_s: float
) -> str:
    counts, sizes = Counter[str](), Counter[int]()
    for job in ended:
        counts.update(
            f"{incident.cause}: {incident.decision}" for incident in product.client.incidents(job)
        )
        sizes.update(attempt.world_size for attempt in product.client.attempts(job))
        events = product.client.events(job, limit=1000).items
        counts["queued again"] += sum(
            event.data.get("reason") == "it was given back" for event in events
        )
    return (
        f"seed {SEED}: {dict(changes)}, {len(ended)} jobs in {passed_s:.0f} s; attempts by world "
        f"size {dict(sizes)}; {dict(counts)}"
    )
