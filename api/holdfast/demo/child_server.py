"""Runs the demo's own `holdfast serve` as a child process, and removes everything it created."""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.schemas import ServerFile
from holdfast_service.embedded_cluster import local_cluster

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 45.0
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerDidNotStart(HoldfastError):
    """The child process did not report that it serves."""

    code = "server_did_not_start"


@contextlib.contextmanager
def child_server(nodes: int) -> Iterator[ServerFile]:
    """A server on a free port with a private data directory; both are removed afterwards.

    During the clean-up, signals are ignored. Call it in the main thread.
    """
    data_dir = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    log = data_dir / "server.log"
    process: subprocess.Popen[str] | None = None
    try:
        with log.open("w") as errors:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0"),
                    *("--data-dir", str(data_dir), "--local-nodes", str(nodes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # only the demo receives Ctrl-C
            )
        yield _wait_until_ready(process, log)
    finally:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _stop(process)
        local_cluster.stop(data_dir)
        shutil.rmtree(data_dir, ignore_errors=True)


def _wait_until_ready(process: subprocess.Popen[str], log: Path) -> ServerFile:
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.2)[0]:
            line = process.stdout.readline()
            if not line:
                break
            return ServerFile.model_validate_json(line)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise ServerDidNotStart(f"`holdfast serve` did not start; the end of its log:\n{tail}")


def _stop(process: subprocess.Popen[str] | None) -> None:
    if process is None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
