"""Where a job's packages are on a node, and how a process uses them. Every zygote imports this
module, so it leaves out what only pip needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

FOLDER = "packages"
"""The folder in the node's cache for the packages of all jobs."""


def packages_folder(pins: Sequence[str], cache: str | Path) -> Path:
    """The folder of the modules of these packages on a node, once they are installed."""
    return modules_of(environment_folder(pins, Path(cache)))


def environment_folder(pins: Sequence[str], cache: Path) -> Path:
    return cache / FOLDER / folder_name(pins)


def modules_of(folder: Path) -> Path:
    """The folder of the modules in a virtual environment."""
    base = str(folder)
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))


def enter(modules: str) -> None:
    """Make the packages importable, before those of the node, here and in the programs that this
    process starts."""
    if not modules:
        return
    site.addsitedir(modules)
    sys.path.remove(modules)
    sys.path.insert(0, modules)
    paths = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (modules, paths)))
    programs = Path(modules).parents[2] / "bin"
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(programs), os.environ.get("PATH"))))


def folder_name(pins: Sequence[str]) -> str:
    """The name of the folder of these packages; it differs between installations of Python."""
    version = f"{sys.implementation.cache_tag}-{sys.platform}-{sys.prefix}"
    digest = hashlib.sha256(json.dumps([version, *pins]).encode())
    return digest.hexdigest()[:32]
