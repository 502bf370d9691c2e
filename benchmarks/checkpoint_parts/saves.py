"""The cost of a memory checkpoint at every step, against none and against PyTorch's own savers.

One rank runs per raylet, with some MB of state that changes in every step. Under Holdfast, through
serve and REST, one job after the other on one server: without checkpoints, in local memory only,
and with a partner's copy. Under torchrun, with the same recipe and loop: no saver, `torch.save`,
and `async_save` of `torch.distributed.checkpoint` at its default and at its best settings, all to
/dev/shm. The stall is the time that a save blocks the training thread; the added time is the
increase of the step time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import yaml

from benchmarks import holdfast_side
from benchmarks.checkpoint_parts.floor import floor
from benchmarks.conditions import report, torchrun

Saver = Literal["none", "torch_save", "dcp_default", "dcp_best"]
SAVERS: tuple[Saver, ...] = get_args(Saver)
"""The settings of PyTorch's savers; see `stock_savers`."""
RUN_S = 300.0
SKIP = 14
"""Skipped first steps: they fill caches and use up the time allowance for late partners."""
MATRIX_MB = 16
MATRIX_DIM = 2048


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
        """Return for how long one save blocks the training thread."""
        return _trimmed_mean(self.stalls_s) * self.interval

    def __str__(self) -> str:
        stalls = f"a save every {self.interval:.2f} steps with a stall of {self.stall_s:.4f} s"
        return f"step {self.step_s:.4f} s, {stalls} ({len(self.times_s)} steps)"

    def added_s(self, without: MeasuredSteps) -> float:
        """Return the added step time per save; a negative one is noise and counts as 0."""
        return max(0.0, self.step_s - without.step_s) * self.interval


@dataclass(frozen=True)
class SaveFigures:
    """The figures of one number of ranks: trimmed means in seconds by saver, and ratios, which are
    None if that saver was left out or never waited."""

    stall_vs_dcp_default: float | None
    stall_vs_dcp_best: float | None
    added_vs_floor: float
    own_added_vs_floor: float
    step_s: dict[str, float]
    stall_s: dict[str, float]
    added_s: dict[str, float]
    interval_steps: dict[str, float]
    floor_s: dict[str, float]


def measure(
    unsaved: Mapping[str, Any], state_mb: int, savers: Sequence[Saver], memory: Path
) -> SaveFigures:
    """Measure the job `unsaved` with each saver; `memory` is a folder that does not exist yet."""
    ranks = int(unsaved["parallel"]["dp_shard"])
    found: dict[str, MeasuredSteps] = {}
    for saver in savers:
        found[saver] = stock(unsaved, ranks, saver)
        report(f"{saver}: {found[saver]}")
    with holdfast_side.serving(ranks) as server:
        for name, every_steps, per_node in (
            ("holdfast_none", 0, 1),
            ("holdfast_own", 1, ranks),
            ("holdfast_partner", 1, 1),
        ):
            found[name] = under_holdfast(saved(unsaved, every_steps, per_node), server)
            report(f"{name}: {found[name]}")
    return summary(found, floor(ranks, state_mb << 20, memory))


def summary(found: Mapping[str, MeasuredSteps], floor_s: Mapping[str, float]) -> SaveFigures:
    """Compare the savers with the parts of the floor. Without a partner nothing is sent."""
    added = {
        name: steps.added_s(found["holdfast_none" if "holdfast" in name else "none"])
        for name, steps in found.items()
    }
    stall = {name: steps.stall_s for name, steps in found.items()}
    ours = stall["holdfast_partner"]
    own_floor_s = floor_s["copy"] + floor_s["digest"]
    return SaveFigures(
        stall_vs_dcp_default=_ratio(ours, stall.get("dcp_default", 0.0)),
        stall_vs_dcp_best=_ratio(ours, stall.get("dcp_best", 0.0)),
        added_vs_floor=round(added["holdfast_partner"] / sum(floor_s.values()), 3),
        own_added_vs_floor=round(added["holdfast_own"] / own_floor_s, 3),
        step_s=_rounded({name: steps.step_s for name, steps in found.items()}),
        stall_s=_rounded(stall),
        added_s=_rounded(added),
        interval_steps=_rounded({name: steps.interval for name, steps in found.items()}),
        floor_s=_rounded(floor_s),
    )


def job(ranks: int, state_mb: int, steps: int, work: int) -> dict[str, Any]:
    """Describe a job that takes no checkpoints."""
    unsaved = {
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
    }
    return saved(unsaved, 0, 1)


def saved(job: Mapping[str, Any], every_steps: int, per_node: int) -> dict[str, Any]:
    return {
        **job,
        "resources": {"cpus_per_worker": 0.5, "workers_per_node": per_node, "standby_nodes": 0},
        "checkpoint": {
            "memory": {"every_steps": every_steps},
            "remote": {"every_steps": 0},
            "digest_every_steps": 0,
        },
    }


def under_holdfast(
    document: Mapping[str, Any], server: holdfast_side.RunningServer
) -> MeasuredSteps:
    names = ["step_time_s", "checkpoint_wait_s", "protected_step"]
    with holdfast_side.submitted(server, document) as running:
        running.client.wait(running.id, RUN_S, poll_s=1.0)  # an ended job has all its rows
        points = list(running.client.metrics(running.id, names))
    rows = [[float(point.values[name] or 0.0) for name in names] for point in points][SKIP:]
    times, waits, protected = (list(column) for column in zip(*rows, strict=True))
    saves = len(set(protected)) - 1
    return MeasuredSteps(times, waits, (protected[-1] - protected[0]) / saves if saves else 1.0)


def stock(document: Mapping[str, Any], ranks: int, saver: str) -> MeasuredSteps:
    with tempfile.TemporaryDirectory(
        prefix="bench-", dir="/dev/shm", ignore_cleanup_errors=True
    ) as kept:
        path, rows = Path(kept) / "job.yaml", Path(kept) / "rows.jsonl"
        path.write_text(yaml.safe_dump(dict(document)))
        module = "benchmarks.checkpoint_parts.stock_savers"
        done = torchrun(ranks, module, str(path), saver, kept, str(rows), timeout_s=RUN_S)
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
    if len(lines) < document["train"]["steps"]:
        raise RuntimeError(f"{saver} failed at step {len(lines)}:\n{done.stderr[-4000:]}")
    if done.returncode:
        report(f"{saver} finished all steps and then exited with {done.returncode}")
    times, stalls, saves = zip(*lines[SKIP:], strict=True)
    made = saves[-1] - saves[0]
    return MeasuredSteps(times, stalls, (len(saves) - 1) / made if made else 1.0)


def _trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest tenth; a median would hide every second step."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def _ratio(value: float, to: float) -> float | None:
    return round(value / to, 4) if to > 0 else None


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}
