"""Training downtime of programs that users bring, after a rank is killed: stock against Holdfast.

    python -m benchmarks.bring --json [--kills N]

The same file runs on both sides, on two ranks: a DDP script with its own checkpoint file under
torchrun and as a job with `script`, and a Ray Train function under Ray Train and as a job with
`ray_train`, with checkpoints on disk (level 0) and in memory too (level 2). Measured are the
seconds from SIGKILL of a rank to the first step beyond every step that was made before it. Each
side runs once, and its ranks are killed in turn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import holdfast_side, ray_train_side
from benchmarks.conditions import ROOT, report, run
from benchmarks.figures import SideFigures, side_figures
from benchmarks.holdfast_side import RunningServer
from benchmarks.step_files import StepFiles, scratch, started

RANKS = 2
USERS_FOLDER = ROOT / "benchmarks" / "brought" / "users"
SCRIPT = USERS_FOLDER / "ddp_script.py"
FUNCTION = "ray_function:train_loop_per_worker"
WIDTH, EVERY = 256, 5
"""Of the network, and the steps between two checkpoints."""
STEPS, FAILURES = 1_000_000, 1000
"""More than are made."""
GRACE_S = 2.0
"""After the last kill nothing is saved any more."""
RAY_TRAIN = "ray_train_"
Side = Literal[
    "torchrun",
    "ray_train_default",
    "ray_train_best",
    "holdfast_script",
    "holdfast_ray_level0",
    "holdfast_ray_level2",
]


@dataclass(frozen=True)
class BringResult:
    """The last line: each side, and the ratios of the medians, stock to Holdfast. None: left out.

    Of Ray Train's settings the faster one counts.
    """

    ray_train_level2_ratio: float | None
    ray_train_level0_ratio: float | None
    torchrun_level0_ratio: float | None
    sides: dict[str, SideFigures]


def measure(
    kills: int = 3,
    steps_between: int = 12,
    sides: tuple[Side, ...] = (
        "torchrun",
        "ray_train_best",
        "holdfast_script",
        "holdfast_ray_level0",
        "holdfast_ray_level2",
    ),
) -> BringResult:
    """Measure each side.

    Args:
        kills: per side
    """
    report(f"{RANKS} ranks, a network of width {WIDTH}, a checkpoint every {EVERY} steps")
    found: dict[str, SideFigures] = {}
    with contextlib.ExitStack() as at_end:
        server: RunningServer | None = None
        for side in sorted(sides, key=lambda name: name.startswith("holdfast")):
            if side.startswith("holdfast") and server is None:
                server = at_end.enter_context(holdfast_side.serving(RANKS))
            report(side)
            with _under_holdfast(side, server) if server else _stock(side) as files:
                victims = [number % RANKS for number in range(kills)]
                found[side] = side_figures(files.measure(victims, RANKS, steps_between))
    medians = {name: figures.median_s for name, figures in found.items()}
    ray_train = [seconds for name, seconds in medians.items() if name.startswith(RAY_TRAIN)]
    best = min(ray_train, default=None)
    return BringResult(
        ray_train_level2_ratio=_ratio(best, medians.get("holdfast_ray_level2")),
        ray_train_level0_ratio=_ratio(best, medians.get("holdfast_ray_level0")),
        torchrun_level0_ratio=_ratio(medians.get("torchrun"), medians.get("holdfast_script")),
        sides=found,
    )


def _ratio(stock_s: float | None, holdfast_s: float | None) -> float | None:
    return None if stock_s is None or holdfast_s is None else round(stock_s / holdfast_s, 2)


@contextlib.contextmanager
def _stock(side: str) -> Iterator[StepFiles]:
    if side.startswith(RAY_TRAIN):
        setting = ray_train_side.SETTINGS[side.removeprefix(RAY_TRAIN)]
        function = f"benchmarks.brought.users.{FUNCTION}"
        ranks = (RANKS, RANKS)
        with ray_train_side.training(function, _function_config, setting, ranks) as files:
            yield files
        return
    with scratch() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
            *("--max-restarts", str(FAILURES), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), *_script_options(folder)),
        ]
        # With it torchrun's ranks find each other again after a restart.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with started(command, folder, variables) as files:
            yield files


@contextlib.contextmanager
def _under_holdfast(side: str, server: RunningServer) -> Iterator[StepFiles]:
    """Run the brought program under Holdfast, with a node for each rank."""
    with scratch() as folder:
        job = {
            "name": "bring-benchmark",
            "code": str(USERS_FOLDER),
            "parallel": {"dp_shard": RANKS},
            "resources": {"cpus_per_worker": 0.5, "workers_per_node": 1},
            "checkpoint": {"memory": {"every_steps": int(side.endswith("level2"))}},
            "recovery": {"max_failures": FAILURES},
            "program": {"grace_s": GRACE_S},
        }
        if side == "holdfast_script":
            job["script"] = [SCRIPT.name, *_script_options(folder)]
        else:
            storage = {"storage_path": str(folder / "storage"), "name": "run", "num_to_keep": 2}
            config = _function_config(folder / "steps")
            job |= {"ray_train": FUNCTION, "config": config, "ray_run": storage}
        with holdfast_side.submitted(server, job) as running:

            def why_ended() -> str:
                return str(running) if running.client.get(running.id).state.terminal else ""

            yield StepFiles(folder / "steps", why_ended)


def _script_options(folder: Path) -> list[str]:
    """The script's arguments, the same on both sides."""
    return [
        *("--checkpoint", str(folder / "checkpoint.pt"), "--every", str(EVERY)),
        *("--steps", str(STEPS), "--width", str(WIDTH), "--steps-folder", str(folder / "steps")),
    ]


def _function_config(steps: Path) -> dict[str, Any]:
    """The Ray Train function's configuration, the same on both sides. `steps`: a folder."""
    return {"width": WIDTH, "every": EVERY, "steps": STEPS, "steps_folder": str(steps)}


if __name__ == "__main__":
    run(measure)
