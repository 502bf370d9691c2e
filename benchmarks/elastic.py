"""Changes of an elastic world: Holdfast against Ray Train's elastic `ScalingConfig`.

    python -m benchmarks.elastic --json [--rounds N]

A job of eight ranks on four nodes, without a standby. In each round Holdfast goes through five
changes: one rank is killed (recovery in place), a node is lost with all its processes (the world
shrinks to six ranks), a node joins (it grows), and a user orders a node less and then that node
again. Ray Train loses and regains a node in the same way, on a cluster with the same settings,
among them Ray's health checks of nodes. Both sides use the same model, data and step loop, and keep
the state of every step. Detection is included. All started processes are ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.conditions import ROOT, load_job, report, run
from benchmarks.holdfast_side import running
from benchmarks.ray_train_side import SETTINGS
from benchmarks.recovery import ALL, Settings, endless, ray_train_spec
from benchmarks.resizes import changes
from benchmarks.resizes.changes import Change, ElasticResult, Sizes, elastic_summary
from benchmarks.resizes.ray_train_world import RayTrainWorld
from holdfast_service.embedded_cluster.local_cluster import RayHealthCheck

ELASTIC_JOB = ROOT / "benchmarks" / "elastic.yaml"


def measure(
    rounds: int = 3,
    job: Path = ELASTIC_JOB,
    nodes: int = 4,
    ranks_per_node: int = 2,
    settle_steps: int = 10,
    health_period_s: float = RayHealthCheck.period_s,
    health_failures: int = RayHealthCheck.failures,
    settings: Settings = ALL,
) -> ElasticResult:
    """Measure both sides.

    Args:
        settle_steps: steps before each change
        health_period_s: of Ray's health checks of nodes, on both sides
        health_failures: unanswered checks of a dead node; more on a busy machine
        settings: of Ray Train; without a value it is left out
    """
    sizes = Sizes(nodes, ranks_per_node, rounds, settle_steps)
    document = endless(load_job(job))
    document["resources"]["nodes"]["max"] = nodes
    document["resources"]["workers_per_node"] = ranks_per_node
    # The largest mesh in place of `auto`, as the bare training core needs it.
    spec = ray_train_spec({**document, "parallel": {"dp_shard": sizes.ranks}})
    health = RayHealthCheck(health_period_s, health_failures)
    report(f"both sides: {sizes}, an embedded cluster with {health}; {document}")
    os.environ["HOLDFAST_PACE__NODE_HEALTH_PERIOD_S"] = str(health.period_s)
    os.environ["HOLDFAST_PACE__NODE_HEALTH_FAILURES"] = str(health.failures)
    load = [os.getloadavg()[0]]
    with running(document, nodes) as world:
        ours = changes.measure("holdfast", world, sizes, tuple(Change))
    theirs = {}
    for setting in (SETTINGS[name] for name in settings):
        report(f"Ray Train: {setting}")
        with RayTrainWorld.training(spec, setting, sizes, health) as restarting:
            lost_and_back = (Change.SHRINK, Change.GROW)
            theirs[setting.name] = changes.measure(setting.name, restarting, sizes, lost_and_back)
    return elastic_summary(ours, theirs, sizes, [*load, os.getloadavg()[0]])


if __name__ == "__main__":
    run(measure)
