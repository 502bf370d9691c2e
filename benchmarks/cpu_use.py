"""CPU use of parts of a benchmark; those of an embedded Holdfast are the kinds of its processes,
except the training ranks."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from holdfast.schemas import SERVER_FILE
from holdfast_service.embedded_cluster import local_cluster, processes

RANK = "hf-worker"


class CpuUse:
    """Measures from construction to :meth:`cores`; a process that ends in between is left out.

    `find` returns the present process ids, each with the name of its part.
    """

    def __init__(self, find: Callable[[], Mapping[int, str]]) -> None:
        self._find = find
        self._began = time.monotonic()
        self._before = {pid: seconds for pid, (_, seconds) in self._used().items()}

    def cores(self) -> dict[str, float]:
        """Processors that each part used on average, largest first."""
        wall_s = time.monotonic() - self._began
        spent: dict[str, float] = defaultdict(float)
        for pid, (part, seconds) in self._used().items():
            spent[part] += seconds - self._before.get(pid, 0.0)
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        return {part: round(seconds / wall_s, 4) for part, seconds in ordered}

    def _used(self) -> dict[int, tuple[str, float]]:
        found = {}
        for pid, part in self._find().items():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                found[pid] = (part, times.user + times.system)
        return found


def with_children(pid: int, part: str) -> dict[int, str]:
    process = psutil.Process(pid)
    return dict.fromkeys((pid, *(each.pid for each in process.children(recursive=True))), part)


def of_holdfast(data_dir: Path) -> dict[int, str]:
    """Raises RuntimeError if no embedded cluster runs for this folder."""
    cluster = local_cluster.find(data_dir)
    if cluster is None:
        raise RuntimeError(f"no embedded cluster runs for {data_dir}")
    found = {int(json.loads((data_dir / SERVER_FILE).read_text())["pid"]): "serve"}
    for pid in processes.of_cluster(cluster.cluster_id):
        with contextlib.suppress(psutil.Error):
            kind = _kind(psutil.Process(pid))
            if kind != RANK:
                found.setdefault(pid, kind)
    return found


def _kind(process: psutil.Process) -> str:
    command = process.cmdline()
    # For example `-m holdfast_workers.child_programs.zygote`.
    if "-m" in command:
        name = process.name()
        return name if name.startswith("hf-") else command[command.index("-m") + 1]
    if Path(command[0]).name.startswith("python"):
        return next((Path(part).stem for part in command[1:] if part.endswith(".py")), "python")
    return Path(command[0].split()[0]).name.split(".")[0]
