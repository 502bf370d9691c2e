"""The cost of a memory checkpoint at every step, against none and against PyTorch's own savers.

    python -m benchmarks.checkpoint --json [--ranks N ...] [--state-mb M] [--steps N]

One rank runs per raylet, with `--state-mb` of state that changes in every step. Under Holdfast,
through serve and REST: without checkpoints, in local memory only, and with a partner's copy. Under
torchrun, with the same recipe and loop: no saver, `torch.save`, and `async_save` of
`torch.distributed.checkpoint` at its default and at its best settings, all to /dev/shm. The floor
is the time to copy, hash and send those bytes with nothing else running. The stall is the time that
a save blocks the training thread; the added time is the increase of the step time. The last
measurement is the growth in resident memory of ranks and node agents over 500 saves of a smaller
state with a partner.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import yaml

from benchmarks import holdfast_side
from benchmarks.conditions import machine, print_json, report, torchrun
from benchmarks.floor import floor
from benchmarks.stock_savers import SAVERS

RUN_S = 300.0
SKIP = 14
"""Skipped first steps: they fill caches and use up the time allowance for late partners."""
MATRIX_MB = 16
MATRIX_DIM = 2048
SAVES = 500
WARM_UP = 100
SMALL_MB = 16
SMALL_WORK = 10


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps without the skipped ones: seconds per step, the part of them during which a
    save blocked the training thread, and the number of steps from one save to the next."""

    times_s: Sequence[float]
    stalls_s: Sequence[float]
    interval: float = 1.0

    @property
    def step_s(self) -> float:
        return _trimmed_mean(self.times_s)

    @property
    def stall_s(self) -> float:
        """Per save."""
        return _trimmed_mean(self.stalls_s) * self.interval

    def added_s(self, without: MeasuredSteps) -> float:
        """Increase of the step time per save. A negative difference is noise and counts as 0."""
        return max(0.0, self.step_s - without.step_s) * self.interval


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report("conditions: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
    by_ranks = {}
    for ranks in options.ranks:
        report(f"{ranks} ranks of {options.state_mb} MB each, {options.steps} steps")
        by_ranks[str(ranks)] = measure(ranks, options.state_mb, options.steps, options.work)
    grown = growth(min(options.ranks))
    report(f"{SAVES} saves added {grown} MB to the process with the largest growth")
    summary = {
        **{name: max(by_rank[name] for by_rank in by_ranks.values()) for name in RATIOS},
        "resident_growth_mb": grown,
        "by_ranks": by_ranks,
    }
    if options.json:
        print_json(summary)
    return 0


RATIOS = ("stall_vs_dcp_default", "stall_vs_dcp_best", "added_vs_floor")


def measure(ranks: int, state_mb: int, steps: int, work: int) -> dict[str, Any]:
    found: dict[str, MeasuredSteps] = {}
    for saver in SAVERS:
        found[saver] = stock(job(ranks, state_mb, steps, work, memory=0), ranks, saver)
        _report_steps(saver, found[saver])
    for name, memory, per_node in (
        ("holdfast_none", 0, 1),
        ("holdfast_own", 1, ranks),
        ("holdfast_partner", 1, 1),
    ):
        found[name] = under_holdfast(job(ranks, state_mb, steps, work, memory, per_node), ranks)
        _report_steps(name, found[name])
    floors = {
        "own": floor(ranks, state_mb << 20, partner=False),
        "partner": floor(ranks, state_mb << 20, partner=True),
    }
    report(f"floor: own {floors['own']['total']:.3f} s, partner {floors['partner']['total']:.3f} s")
    return summary(found, floors)


def summary(
    found: Mapping[str, MeasuredSteps], floors: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Trimmed means, and ratios."""
    added = {
        name: steps.added_s(found["holdfast_none" if "holdfast" in name else "none"])
        for name, steps in found.items()
    }
    stall = {name: steps.stall_s for name, steps in found.items()}
    ours = stall["holdfast_partner"]
    return {
        "stall_vs_dcp_default": round(ours / stall["dcp_default"], 4),
        "stall_vs_dcp_best": round(ours / stall["dcp_best"], 4),
        "added_vs_floor": round(added["holdfast_partner"] / floors["partner"]["total"], 3),
        "own_added_vs_floor": round(added["holdfast_own"] / floors["own"]["total"], 3),
        "step_s": _rounded({name: steps.step_s for name, steps in found.items()}),
        "stall_s": _rounded(stall),
        "added_s": _rounded(added),
        "interval_steps": _rounded({name: steps.interval for name, steps in found.items()}),
        "floor_s": {name: _rounded(parts) for name, parts in floors.items()},
    }


def job(
    ranks: int, state_mb: int, steps: int, work: int, memory: int, per_node: int = 1
) -> dict[str, Any]:
    return {
        "name": "big-state",
        "recipe": "benchmarks.recipes.big_state:BigState",
        "model": {
            "dim": MATRIX_DIM,
            "layers": -(-state_mb // MATRIX_MB),
            "heads": 1,
            "sequence_length": work,
        },
        "train": {
            "steps": steps,
            "global_batch": ranks,
            "micro_batch": 1,
            "schedule": {"name": "constant", "warmup_steps": 1},
        },
        "parallel": {"dp_shard": ranks},
        "resources": {"cpus_per_worker": 0.5, "workers_per_node": per_node, "standby_nodes": 0},
        "checkpoint": {
            "memory": {"every_steps": memory},
            "remote": {"every_steps": 0},
            "digest_every_steps": 0,
        },
    }


def under_holdfast(document: Mapping[str, Any], nodes: int) -> MeasuredSteps:
    names = ["step_time_s", "checkpoint_wait_s", "protected_step"]
    with holdfast_side.running(document, nodes) as running:
        running.wait_step(document["train"]["steps"] - 1, RUN_S, poll_s=1.0)
        points = list(running.client.metrics(running.id, names))
    rows = [[float(point.values[name] or 0.0) for name in names] for point in points][SKIP:]
    times, waits, protected = (list(column) for column in zip(*rows, strict=True))
    saves = len(set(protected)) - 1
    return MeasuredSteps(times, waits, (protected[-1] - protected[0]) / saves if saves else 1.0)


def growth(ranks: int) -> float:
    """Largest growth in resident memory of one process over the saves, in MB."""
    steps = WARM_UP + SAVES
    document = job(ranks, SMALL_MB, steps + WARM_UP, SMALL_WORK, memory=1)
    with holdfast_side.running(document, ranks) as running:
        running.wait_step(WARM_UP, RUN_S)
        rank_processes = [psutil.Process(pid) for pid in running.pids().values()]
        agents = {rank.parent() or rank for rank in rank_processes}
        before = {process: process.memory_info().rss for process in (*rank_processes, *agents)}
        running.wait_step(steps, RUN_S)
        grown = [process.memory_info().rss - rss for process, rss in before.items()]
    return round(max(grown) / (1 << 20), 2)


def stock(document: Mapping[str, Any], ranks: int, saver: str) -> MeasuredSteps:
    kept = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        path, rows = kept / "job.yaml", kept / "rows.jsonl"
        path.write_text(yaml.safe_dump(dict(document)))
        program = ("benchmarks.stock_savers", str(path), saver, str(kept), str(rows))
        done = torchrun(ranks, *program, timeout_s=RUN_S)
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        if len(lines) < document["train"]["steps"]:
            raise RuntimeError(f"{saver} failed at step {len(lines)}:\n{done.stderr[-4000:]}")
        if done.returncode:
            report(f"{saver} finished all steps and then exited with {done.returncode}")
        times, stalls, saves = zip(*lines[SKIP:], strict=True)
        made = saves[-1] - saves[0]
        return MeasuredSteps(times, stalls, (len(saves) - 1) / made if made else 1.0)
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def _report_steps(name: str, steps: MeasuredSteps) -> None:
    report(
        f"{name:>16}: step {steps.step_s * 1e3:8.1f} ms, save every {steps.interval:.2f} steps "
        f"with a stall of {steps.stall_s * 1e3:8.1f} ms ({len(steps.times_s)} steps)"
    )


def _trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest tenth; a median would hide every second step."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 and 4")
    parser.add_argument("--state-mb", type=int, default=256, help="per rank; default 256")
    parser.add_argument("--steps", type=int, default=50, help="per run; default 50")
    parser.add_argument(
        "--work", type=int, default=300, help="matrix products per step; default 300"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
