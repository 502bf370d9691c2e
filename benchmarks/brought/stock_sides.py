"""The stock sides: torchrun, and Ray Train on its own cluster. They leave no process behind."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.brought.step_files import StepFiles
from benchmarks.conditions import ROOT, environment
from benchmarks.ray_train_side import RayTrainSetting
from holdfast_service.embedded_cluster import processes

USERS_FOLDER = ROOT / "benchmarks" / "brought" / "users"
SCRIPT = USERS_FOLDER / "ddp_script.py"
WIDTH = 256
EVERY = 5
"""Steps between two checkpoints."""
STEPS = 1_000_000
"""More than are made."""
MOST_RESTARTS = 1000


@contextlib.contextmanager
def torchrun(ranks: int) -> Iterator[StepFiles]:
    """With the setting by which torchrun's ranks find each other again after a restart."""
    with _folder() as (mark, folder):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--max-restarts", str(MOST_RESTARTS), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "127.0.0.1:0", *script_line(folder)),
        ]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with _running(command, variables, mark, folder) as files:
            yield files


@contextlib.contextmanager
def ray_train(ranks: int, setting: RayTrainSetting) -> Iterator[StepFiles]:
    with _folder() as (mark, folder):
        storage = Path(f"/dev/shm/bench-{mark}") if setting.in_memory else folder / "storage"
        ray_temp = Path(tempfile.gettempdir()) / f"ray-{mark}"  # short: socket paths are limited
        storage.mkdir(mode=0o700)
        path = folder / "config.json"
        config = {
            "loop": function_config(folder),
            "ray_temp_dir": str(ray_temp),
            "storage": str(storage),
            "ranks": ranks,
        }
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "benchmarks.brought.stock_trainer", str(path)]
        try:
            with _running(command, setting.environment, mark, folder) as files:
                yield files
        finally:
            for left in (storage, ray_temp):
                shutil.rmtree(left, ignore_errors=True)


def script_line(folder: Path) -> list[str]:
    """The script with its arguments, the same on both sides."""
    return [
        *(str(SCRIPT), "--checkpoint", str(folder / "checkpoint.pt"), "--every", str(EVERY)),
        *("--steps", str(STEPS), "--width", str(WIDTH), "--steps-folder", str(folder / "steps")),
    ]


def function_config(folder: Path) -> dict[str, object]:
    """The Ray Train function's configuration, the same on both sides."""
    steps = str(folder / "steps")
    return {"width": WIDTH, "every": EVERY, "steps": STEPS, "steps_folder": steps}


@contextlib.contextmanager
def _folder() -> Iterator[tuple[str, Path]]:
    mark = secrets.token_hex(4)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{mark}-"))
    (folder / "steps").mkdir()
    try:
        yield mark, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(
    command: list[str], variables: Mapping[str, str], mark: str, folder: Path
) -> Iterator[StepFiles]:
    log = folder / "side.log"
    found = environment()
    found["PYTHONPATH"] = f"{USERS_FOLDER}:{found['PYTHONPATH']}"
    marked = {processes.CLUSTER_MARK: mark, "TMPDIR": str(folder)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**found, **variables, **marked},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def why_ended() -> str:
        if process.poll() is None:
            return ""
        tail = log.read_text(errors="replace").splitlines()[-30:]
        return f"it ended with {process.returncode}:\n" + "\n".join(tail)

    try:
        yield StepFiles(folder / "steps", why_ended)
    finally:
        processes.kill_all(lambda: processes.of_cluster(mark))
        process.wait()
