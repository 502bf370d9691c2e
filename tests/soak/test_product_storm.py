"""The long fault storm through the whole product: over REST, on Ray, with API server deaths."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.end_to_end.conftest import Product, served, spec
from tests.support.faults.random_faults import KINDS, percentiles

from holdfast_service.embedded_cluster import local_cluster
from holdfast_workers.fault_injection.kinds import FaultKind

pytestmark = [
    *(pytest.mark.soak, pytest.mark.cluster, pytest.mark.chaos),
    pytest.mark.timeout(4 * 3600),
]
FAULTS = 300
STEPS = 900  # even late faults come well before the end
SHORT_FAULTS = 24
SHORT_STEPS = 400  # a quick machine trains on while the API server starts again
API_DEATH = "api_death"
API_SHARE = 0.05
ADVANCE_S = 240.0


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOLDFAST_QUARANTINE_INCIDENTS", "0")  # all nodes have many incidents
        with served(tmp_path_factory.mktemp("product")) as started:
            yield started


def document(steps: int) -> dict[str, object]:
    whole = spec(name="storm")
    whole["train"] = {**whole["train"], "steps": steps}
    whole["recovery"] = {
        **whole["recovery"],
        "max_failures": 100_000,
        "max_without_progress": 100_000,
        "wait_for_replacement_s": 600.0,  # nodes and supervisors may die in one burst
    }
    return whole


def test_three_hundred_faults_over_rest_change_no_bit_and_leave_nothing(product: Product) -> None:
    calm = product.client.submit(document(STEPS))
    assert product.finish(calm.id, 1800.0).state == "SUCCEEDED"
    compare(product, calm.id, STEPS, FAULTS, seed=3)


@pytest.fixture(scope="module")
def short_calm(product: Product) -> str:
    """An undisturbed job of few steps."""
    calm = product.client.submit(document(SHORT_STEPS))
    assert product.finish(calm.id, 600.0).state == "SUCCEEDED"
    return calm.id


@pytest.mark.parametrize("seed", range(10))
def test_short_storms_with_resets_between_processes(
    product: Product, short_calm: str, seed: int
) -> None:
    compare(product, short_calm, SHORT_STEPS, SHORT_FAULTS, seed)


def compare(product: Product, calm: str, steps: int, faults: int, seed: int) -> None:
    """Run the job of `calm` once more under faults, and compare all bits."""
    undisturbed = product.client.digests(calm)
    job = product.client.submit(document(steps)).id
    injected = inject_faults(product, job, random.Random(seed), steps, faults)
    ended = product.finish(job, 1800.0)
    print(summary(product, job, injected))
    assert ended.state == "SUCCEEDED", ended.outcome
    digests = product.client.digests(job)
    assert digests[steps] == undisturbed[steps]
    assert digests.items() <= undisturbed.items()
    sampled = product.samples(job)
    assert sampled.items() <= product.samples(calm).items()
    assert len(product.client.faults(job)) == sum(kind != API_DEATH for _, kind in injected)
    product.wait(lambda: not product.left_of(job), 60.0)


def inject_faults(
    product: Product, job: str, rng: random.Random, steps: int, faults: int
) -> list[tuple[float, str]]:
    injected: list[tuple[float, str]] = []
    kinds = list(KINDS)
    while len(injected) < faults:
        product.wait_step(job, 5 + steps * len(injected) // (2 * faults), ADVANCE_S)
        if rng.random() < API_SHARE:
            injected.append((time.time(), API_DEATH))
            product.kill()
            product.start()
            continue
        kind = rng.choices(kinds, list(KINDS.values()))[0]
        arguments: dict[str, Any] = {"duration_s": 3.0} if kind is FaultKind.REMOTE_DOWN else {}
        if kind.spec.has_rank:
            arguments["rank"] = rng.randrange(4)
        injected.append((time.time(), kind.value))
        product.client.inject(job, kind, **arguments)
        if kind is FaultKind.NODE_LOSS:
            local_cluster.add_node(product.cluster)
    return injected


def summary(product: Product, job: str, injected: list[tuple[float, str]]) -> str:
    found: dict[str, list[float]] = {}
    for incident in product.client.incidents(job):
        before = [kind for at, kind in injected if at <= incident.opened_at]
        total = incident.phases_s.get("total")
        if before and total is not None and incident.cause != "remote_unavailable":
            found.setdefault(before[-1], []).append(total)
    lines = [f"{kind:>17}: {percentiles(times)}" for kind, times in sorted(found.items())]
    return "\n".join([str(dict(Counter(kind for _, kind in injected))), *lines])
