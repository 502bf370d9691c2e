"""The stock sides: torchrun, and Ray Train on its own cluster. They leave no process behind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ray_train_side
from benchmarks.conditions import ROOT
from benchmarks.ray_train_side import RayTrainSetting
from benchmarks.step_files import StepFiles, scratch, started

USERS_FOLDER = ROOT / "benchmarks" / "brought" / "users"
SCRIPT = USERS_FOLDER / "ddp_script.py"
FUNCTION = "ray_function:train_loop_per_worker"
WIDTH = 256
EVERY = 5
"""Steps between two checkpoints."""
STEPS = 1_000_000
"""More than are made."""
MOST_RESTARTS = 1000


@contextlib.contextmanager
def torchrun(ranks: int) -> Iterator[StepFiles]:
    """With the setting by which torchrun's ranks find each other again after a restart."""
    with scratch() as (mark, folder):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--max-restarts", str(MOST_RESTARTS), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "127.0.0.1:0", *script_line(folder)),
        ]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with started(command, mark, folder, variables) as files:
            yield files


def ray_train(ranks: int, setting: RayTrainSetting) -> contextlib.AbstractContextManager[StepFiles]:
    return ray_train_side.running(FUNCTION, function_config, ranks, setting, str(USERS_FOLDER))


def script_line(folder: Path) -> list[str]:
    """The script with its arguments, the same on both sides."""
    return [
        *(str(SCRIPT), "--checkpoint", str(folder / "checkpoint.pt"), "--every", str(EVERY)),
        *("--steps", str(STEPS), "--width", str(WIDTH), "--steps-folder", str(folder / "steps")),
    ]


def function_config(steps: Path) -> dict[str, object]:
    """The Ray Train function's configuration, the same on both sides. `steps`: a folder."""
    return {"width": WIDTH, "every": EVERY, "steps": STEPS, "steps_folder": str(steps)}
