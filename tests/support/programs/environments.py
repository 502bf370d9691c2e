"""The frameworks' packages, each set in a folder of its own on top of the installed torch.

The versions are pinned here and nowhere else. A job installs the same way (`runtime_env: {pip:
[...]}`): beside the packages of the node's Python, never into them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "frameworks"
INSTALL_S = 600.0

TQDM = "tqdm==4.70.1"
PACKAGES = {
    "lightning": (
        "pytorch-lightning==2.6.6",
        "lightning-utilities==0.15.3",
        "torchmetrics==1.9.0",
        TQDM,
    ),
    "transformers": (
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "hf-xet==1.8.0",
        "httpcore2==2.16.2",
        "httpx2==2.16.2",
        "huggingface_hub==2.4.0",
        "regex==2026.11.19",
        "shellingham==1.5.4",
        "tokenizers==0.23.3",
        "truststore==0.10.5",
        "typer==0.29.2",
        TQDM,
    ),
}


def module_paths(name: str = "") -> list[str]:
    """The folders that a script needs on its module path: Holdfast with its entry points, and the
    packages of the environment `name`, installed at the first call. "": none."""
    ours = [str(ROOT / package) for package in ("workers", "service", "api")]
    return [*([str(installed(name))] if name else []), str(entry_points()), *ours]


def installed(name: str) -> Path:
    """The folder with the packages of an environment."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder, pins = FOLDER / name, "\n".join(PACKAGES[name])
    mark = FOLDER / f"{name}.txt"
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists() or mark.read_text() != pins:
            mark.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            _pip(folder, PACKAGES[name])
            mark.write_text(pins)
    return folder


def entry_points() -> Path:
    """A folder with the entry points that pyproject.toml declares: those of an editable
    installation are as old as the installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    folder = FOLDER / "entry-points"
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    for name, text in {"METADATA": version, "entry_points.txt": "\n".join(lines) + "\n"}.items():
        new = about / f"{name}.{os.getpid()}"
        new.write_text(text)
        new.rename(about / name)
    return folder


def _pip(folder: Path, pins: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run(
        [*command, "--no-deps", "--target", str(folder), *pins],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if done.returncode:
        raise RuntimeError(f"pip cannot install {', '.join(pins)}:\n{done.stderr[-2000:]}")
