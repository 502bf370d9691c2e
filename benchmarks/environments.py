"""Virtual environments with peers that need packages of their own."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

from benchmarks.conditions import report


def python_with(home: Path, module: str, *packages: str) -> str:
    """An interpreter with these packages, beside those of this interpreter, created in the folder
    `home` unless it is there. Where an earlier installation failed, it is tried again. `module`:
    what the packages bring."""
    python = home / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    if not (site_packages / module).is_dir():
        report(f"creating {home} for {' '.join(packages)}")
        venv.create(home, with_pip=True)
        (site_packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)
