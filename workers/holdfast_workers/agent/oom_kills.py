"""Whether a process that was killed was killed for want of memory, as far as the kernel tells.

The kernel says of no process why it was killed; it counts. So a SIGKILL is put down to memory when
a counter of such kills has risen since the last look (of the own control group, else of the whole
machine), or when next to no memory is left at that moment. It is a conclusion, and says from what.
"""

from __future__ import annotations

import threading
from pathlib import Path

SHORT_SHARE = 0.02
"""Of all memory: with less than this available, a kill is put down to the shortage."""


class MemoryShortage:
    """`root` is where `proc` and `sys` are; tests give another one. Called from any thread."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._group = _own_group(root)
        self._seen = self._kills()

    def explains_kill(self) -> str:
        """In words, with figures, why a process that got SIGKILL just now was killed for want of
        memory; "" if nothing says so. A kill that was counted explains one look."""
        with self._lock:
            before, self._seen = self._seen, self._kills()
            risen = [name for name, count in self._seen.items() if count > before.get(name, count)]
        memory = _fields(self._root / "proc/meminfo")
        total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
        figures = f"{available >> 10} MiB of {total >> 10} MiB available now{self._group_figures()}"
        if risen:
            return f"the kernel killed for want of memory, by {' and '.join(risen)}; {figures}"
        if total and available < total * SHORT_SHARE:
            return f"killed while memory was short: {figures}"
        return ""

    def _kills(self) -> dict[str, int]:
        """Counts by where they were read. A machine's counter is of everybody on it: it counts only
        where the control group has none."""
        if self._group is not None:
            kills = _fields(self._group / "memory.events").get("oom_kill")
            if kills is not None:
                return {"memory.events of its control group": kills}
        kills = _fields(self._root / "proc/vmstat").get("oom_kill")
        return {} if kills is None else {"oom_kill of the machine": kills}

    def _group_figures(self) -> str:
        if self._group is None:
            return ""
        used, limit = (_whole(self._group / f"memory.{name}") for name in ("current", "max"))
        if used is None or limit is None:
            return ""
        return f", {used >> 20} of {limit >> 20} MiB used in its control group"


def _own_group(root: Path) -> Path | None:
    """The folder of the own control group (version 2), which its children share."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition("::")[2] for line in lines if line.startswith("0::")]
    folders = [root / "sys/fs/cgroup" / name.lstrip("/") for name in (*names, "")]
    return next((one for one in folders if (one / "memory.events").exists()), None)


def _fields(path: Path) -> dict[str, int]:
    """`name value` or `name: value unit`, one a line; none if it cannot be read."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {one[0].rstrip(":"): int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _whole(path: Path) -> int | None:
    """None where there is no number: no such file, or no limit."""
    try:
        said = path.read_text().strip()
    except OSError:
        return None
    return int(said) if said.isdigit() else None
