"""Decides whether a killed process was probably killed by the kernel for lack of memory.

The kernel does not say why a process was killed; it only counts such kills. So a SIGKILL is
attributed to memory when a counter of out-of-memory kills has risen since the last reading (that of
the own control group, else that of the whole machine), or when almost no memory is left at that
moment. The result is a conclusion, and names its evidence.
"""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_workers.byte_sizes import size_of

SHORT_SHARE = 0.02
"""Share of all memory: with less than this available, a kill is attributed to the shortage."""


class MemoryShortage:
    """Thread-safe. `root` is the folder of `proc` and `sys`; tests pass another folder."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._group = _own_group(root)
        self._last_counts = self._kills()

    def explains_kill(self) -> str:
        """Evidence, with figures, that a process that got SIGKILL just now was killed for lack of
        memory; "" if there is none. Each counted kill explains one call."""
        with self._lock:
            before, self._last_counts = self._last_counts, self._kills()
            risen = [
                name for name, count in self._last_counts.items() if count > before.get(name, count)
            ]
        memory = _fields(self._root / "proc/meminfo")
        total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
        machine = f"{size_of(available << 10)} of {size_of(total << 10)} available now"
        figures = machine + self._group_figures()
        if risen:
            counters = " and ".join(risen)
            return f"the kernel killed for lack of memory, according to {counters}; {figures}"
        if total and available < total * SHORT_SHARE:
            return f"killed while memory was short: {figures}"
        return ""

    def _kills(self) -> dict[str, int]:
        """Counter name → out-of-memory kills. The machine's counter includes every user's
        processes, so it is used only where the control group has none."""
        if self._group is not None:
            kills = _fields(self._group / "memory.events").get("oom_kill")
            if kills is not None:
                return {"memory.events of its control group": kills}
        kills = _fields(self._root / "proc/vmstat").get("oom_kill")
        return {} if kills is None else {"oom_kill of the machine": kills}

    def _group_figures(self) -> str:
        if self._group is None:
            return ""
        used, limit = (_number_in(self._group / f"memory.{name}") for name in ("current", "max"))
        if used is None or limit is None:
            return ""
        return f", {size_of(used)} of {size_of(limit)} used in its control group"


def _own_group(root: Path) -> Path | None:
    """The folder of the own control group (version 2), which its children share."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition("::")[2] for line in lines if line.startswith("0::")]
    folders = [root / "sys/fs/cgroup" / name.lstrip("/") for name in (*names, "")]
    return next((folder for folder in folders if (folder / "memory.events").exists()), None)


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of `name value` or `name: value unit`; {} if the file cannot be read."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number_in(path: Path) -> int | None:
    """The number in a file; None without a file or a number (no limit is set)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
