"""Reconcilers in processes of their own that start at once: one process of a test module imports
everything, and forks them.

Run as a program, this module is that process. It reads requests, one JSON document a line:
`{"settings": ..., "folder": ...}` forks a reconciler over the cluster in a folder
(`durable_cluster.py`) and is answered with its process id; `{"wait": pid}` is answered with the
status of its end, as `os.waitstatus_to_exitcode` gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.service.durable_cluster import serve

from holdfast_service.settings import Settings
from holdfast_workers.ipc import linux_processes

PARENT_S = 5.0
ANSWER_S = 120.0
"""Longer than a test lets a reconciler run."""


class ForkedReconciler:
    """Part of the interface of `asyncio.subprocess.Process`."""

    def __init__(self, origin: ReconcilerOrigin, pid: int) -> None:
        self._origin = origin
        self._pid = pid

    async def wait(self) -> int:
        return await asyncio.to_thread(self._origin.ask, {"wait": self._pid})

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class ReconcilerOrigin:
    """The process that has imported everything. Thread-safe; a request waits for the one before."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._lock = threading.Lock()
        self._answer_s = answer_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.service.forked_reconcilers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, settings: Settings, folder: Path) -> ForkedReconciler:
        request = {"settings": settings.model_dump_json(), "folder": str(folder)}
        return ForkedReconciler(self, self.ask(request))

    def ask(self, request: Mapping[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], self._answer_s)[0]:
                self._process.kill()  # its answer would be taken for that of the next request
                raise TimeoutError(f"no answer to {request} within {self._answer_s:g} s")
            return int(self._process.stdout.readline())

    def end(self) -> None:
        """End it with all reconcilers that are left."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def reconciler_origin() -> Iterator[ReconcilerOrigin]:
    origin = ReconcilerOrigin()
    try:
        yield origin
    finally:
        origin.end()


def main() -> None:
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = _fork(request)
        print(answer, flush=True)


def _fork(request: dict[str, str]) -> int:
    origin = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        linux_processes.die_with_parent(origin, PARENT_S)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)
        settings = Settings.model_validate_json(request["settings"])
        asyncio.run(serve(settings, Path(request["folder"])))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
