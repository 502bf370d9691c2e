"""The packages of the training frameworks, installed as a job's own (`runtime_env: {pip: [...]}`):
in an environment beside the packages of the node's Python, never into them.

The versions are pinned here and nowhere else.
"""

from __future__ import annotations

import threading
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

from holdfast_workers.packages.folders import FOLDER as PACKAGES_FOLDER
from holdfast_workers.packages.installation import install

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "frameworks"
INSTALL_S = 600.0

LIGHTNING = (
    "lightning-utilities==0.15.3",
    "pytorch-lightning==2.6.6",
    "torchmetrics==1.9.0",
    "tqdm==4.70.1",
)
BOTH_LIGHTNINGS = ("lightning==2.6.6", *LIGHTNING)
"""Lightning has two packages with the same classes; a script imports one of them."""
TRANSFORMERS = (
    "accelerate==1.15.0",
    "hf-xet==1.8.0",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "huggingface_hub==2.4.0",
    "regex==2026.11.19",
    "shellingham==1.5.4",
    "tokenizers==0.23.3",
    "tqdm==4.70.1",
    "transformers==5.23.0",
    "truststore==0.10.5",
    "typer==0.29.2",
)


def modules_of(pins: tuple[str, ...]) -> Path:
    """The folder of the modules of these packages, installed at the first call."""
    return install(pins, CACHE, INSTALL_S, threading.Event())


def share_with(cache: Path) -> None:
    """Let a node with this cache find what is installed."""
    cache.mkdir(parents=True)
    (cache / PACKAGES_FOLDER).symlink_to(CACHE / PACKAGES_FOLDER)


def write_entry_points(folder: Path) -> None:
    """Write the entry points that pyproject.toml declares to a folder of the module path, unless
    the installation has them: an editable one has those of the day on which it was made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    if all(entry_points(group=group) for group in groups):
        return
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items()), ""]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (about / "METADATA").write_text(version)
    (about / "entry_points.txt").write_text("\n".join(lines))
