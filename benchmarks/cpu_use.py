"""CPU use of each kind of process in an embedded Holdfast, except the training ranks."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from pathlib import Path

import psutil

from holdfast.schemas import SERVER_FILE
from holdfast_service.embedded_cluster import local_cluster, processes

RANK = "hf-worker"


class CpuUse:
    """Measures from construction to :meth:`shares`; a process that ends in between is left out."""

    def __init__(self, data_dir: Path) -> None:
        cluster = local_cluster.find(data_dir)
        if cluster is None:
            raise RuntimeError(f"no embedded cluster runs for {data_dir}")
        self._server = int(json.loads((data_dir / SERVER_FILE).read_text())["pid"])
        self._pids = [self._server, *processes.of_cluster(cluster.cluster_id)]
        self._began = time.monotonic()
        self._before = self._seconds()

    def shares(self) -> dict[str, float]:
        """CPU seconds per second of wall time by kind, largest first; 1.0 is a whole core."""
        wall_s = time.monotonic() - self._began
        spent: dict[str, float] = defaultdict(float)
        for pid, (kind, seconds) in self._seconds().items():
            if pid in self._before:
                spent[kind] += seconds - self._before[pid][1]
        ordered = sorted(spent.items(), key=lambda item: -item[1])
        return {kind: round(seconds / wall_s, 4) for kind, seconds in ordered}

    def _seconds(self) -> dict[int, tuple[str, float]]:
        found = {}
        for pid in self._pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                found[pid] = (self._kind(process), times.user + times.system)
        return {pid: usage for pid, usage in found.items() if usage[0] != RANK}

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self._server:
            return "serve"
        command = process.cmdline()
        # For example `-m holdfast_workers.child_programs.zygote`.
        if "-m" in command:
            name = process.name()
            return name if name.startswith("hf-") else command[command.index("-m") + 1]
        if Path(command[0]).name.startswith("python"):
            return next((Path(part).stem for part in command[1:] if part.endswith(".py")), "python")
        return Path(command[0].split()[0]).name.split(".")[0]
