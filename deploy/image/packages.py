"""The packages of an image: what pyproject.toml needs at run time, at the versions of the lock.

    packages.py requirements EXTRA...   requirement lines for pip, of the base and of these extras
    packages.py check                   the packages of this Python are those of the locks
    packages.py cuda                    the lines of cuda.lock, by an index with torch for CUDA

`cuda.lock` has what torch's build for CUDA needs beyond requirements.lock, whose torch is another
build of the same version. Write it again when requirements.lock names another torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOCK, CUDA_LOCK = ROOT / "requirements.lock", HERE / "cuda.lock"
OWN = "holdfast-train"
INSTALLER = ("pip", "setuptools", "wheel")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["requirements"]:
        print("\n".join(requirements(arguments[1:])))
    elif arguments == ["check"]:
        if wrong := sorted(unlocked()):
            sys.exit(f"not as in requirements.lock: {', '.join(wrong)}: add them to the lock")
    elif arguments == ["cuda"]:
        print("\n".join(cuda_lines()))
    else:
        sys.exit(__doc__)


def requirements(extras: list[str]) -> list[str]:
    """Those of the base and of the extras, which may name further ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, seen = list(project["dependencies"]), set()
    waiting = list(extras)
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        if extra not in project["optional-dependencies"]:
            sys.exit(f"pyproject.toml has no extra {extra!r}")
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{OWN}\[([\w,-]+)\]", line)
            if own:
                waiting += own[1].split(",")
            else:
                found.append(line)
    return sorted(set(found))


def unlocked() -> Iterator[str]:
    """Installed packages, with their versions, that are not as in the locks."""
    locked = {**read_lock(CUDA_LOCK), **read_lock(LOCK)}
    for each in distributions():
        name, public = normal(each.name), each.version.partition("+")[0]
        if locked.get(name) != public and name not in (OWN, *INSTALLER):
            yield f"{name} {each.version}"


def cuda_lines() -> list[str]:
    """The packages that pip would install with torch, beyond those of requirements.lock."""
    locked = read_lock(LOCK)
    torch = f"torch=={locked['torch']}"
    with tempfile.NamedTemporaryFile() as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", report.name, "--constraint", str(LOCK), torch]
        subprocess.run(command, check=True, stdout=sys.stderr)
        found = [each["metadata"] for each in json.loads(Path(report.name).read_text())["install"]]
    beyond = [each for each in found if normal(each["name"]) not in locked]
    if not beyond:
        sys.exit("pip would install torch for the CPU: name an index with its build for CUDA")
    return [f"# {torch}", *sorted(f"{each['name']}=={each['version']}" for each in beyond)]


def read_lock(path: Path) -> dict[str, str]:
    """Versions by normal name."""
    lines = (line.partition("==") for line in path.read_text().splitlines() if line[:1] != "#")
    return {normal(name): version for name, _, version in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
