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

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from benchmarks.conditions import (
    ROOT,
    describe_model,
    load_job,
    parser,
    print_json,
    report,
    report_conditions,
)
from benchmarks.recovery import endless, ray_train_spec
from benchmarks.resizes import holdfast_changes, ray_train_changes
from benchmarks.resizes.changes import MeasuredChange, elastic_summary
from benchmarks.resizes.ray_train_changes import SETTINGS
from holdfast_service.embedded_cluster.local_cluster import RayHealthCheck

ELASTIC_JOB = ROOT / "benchmarks" / "elastic.yaml"
HOLDFAST = "holdfast"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    job = _sized(endless(load_job(options.job)), options.nodes, options.ranks_per_node)
    _print_conditions(job, options)
    health = RayHealthCheck(options.health_period_s, options.health_failures)
    load = [os.getloadavg()[0]]
    found = {
        HOLDFAST: _reported(
            HOLDFAST,
            holdfast_changes.measure(
                job, health, options.nodes, options.rounds, options.settle_steps
            ),
        )
    }
    for setting in SETTINGS:
        if setting.name in options.settings:
            spec = ray_train_spec(_with_numbers(job, options))
            changes = ray_train_changes.measure(
                spec, setting, health, options.nodes, options.rounds, options.settle_steps
            )
            found[setting.name] = _reported(f"Ray Train {setting.name}", changes)
    load.append(os.getloadavg()[0])
    ours = found.pop(HOLDFAST)
    summary = elastic_summary(ours, found, load)
    for side, of_side in {HOLDFAST: summary.holdfast, **summary.ray_train}.items():
        for change, figures in of_side.items():
            report(f"{side:<9} {change:<15} {figures}")
    report(
        f"shrink: {summary.ratio} times faster than Ray Train (bar: 15); "
        f"pause of a planned grow: {summary.planned_ratio} of a recovery in place (bar: 1.5)"
    )
    if options.json:
        print_json(summary)
    return 0


def _sized(job: Mapping[str, Any], nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """The job on at most `nodes` nodes of `ranks_per_node` ranks."""
    changed = deepcopy(dict(job))
    changed["resources"]["nodes"]["max"] = nodes
    changed["resources"]["workers_per_node"] = ranks_per_node
    return changed


def _with_numbers(job: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The job with its largest mesh in place of `auto`, as the bare training core needs it."""
    return {**job, "parallel": {"dp_shard": options.nodes * options.ranks_per_node}}


def _reported(side: str, changes: Iterator[MeasuredChange]) -> list[MeasuredChange]:
    found = []
    for change in changes:
        found.append(change)
        report(f"{side}: {change}; load {os.getloadavg()[0]:.1f}")
    return found


def _print_conditions(job: Mapping[str, Any], options: argparse.Namespace) -> None:
    report_conditions()
    report(f"model: {describe_model(job)}; checkpoint every step; {options.rounds} rounds")
    report(
        f"both sides: an embedded cluster of a head and {options.nodes} raylets, "
        f"{options.ranks_per_node} ranks on each; Ray's health check of nodes: every "
        f"{options.health_period_s:g} s, dead after {options.health_failures} unanswered"
    )
    for setting in SETTINGS:
        if setting.name in options.settings:
            report(f"Ray Train, {setting.name}: {setting.why}; FailureConfig(max_failures=-1)")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("elastic", __doc__)
    options.add_argument("--rounds", type=int, default=3, help="of each side; default 3")
    options.add_argument(
        "--job", type=Path, default=ELASTIC_JOB, help=f"default: {ELASTIC_JOB.name}"
    )
    options.add_argument("--nodes", type=int, default=4, help="default 4")
    options.add_argument("--ranks-per-node", type=int, default=2, help="default 2")
    options.add_argument(
        "--settle-steps", type=int, default=10, help="steps before each change; default 10"
    )
    options.add_argument(
        "--health-period-s",
        type=float,
        default=RayHealthCheck.period_s,
        help=f"of Ray's health checks of nodes, on both sides; default {RayHealthCheck.period_s:g}",
    )
    options.add_argument(
        "--health-failures",
        type=int,
        default=RayHealthCheck.failures,
        help=f"unanswered checks of a dead node; default {RayHealthCheck.failures}; more on a "
        "busy machine",
    )
    options.add_argument(
        "--settings",
        nargs="*",
        default=[setting.name for setting in SETTINGS],
        choices=[setting.name for setting in SETTINGS],
        help="settings of Ray Train; default: all; without a value: Ray Train is left out",
    )
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
