"""Runs a `holdfast serve` with an embedded cluster as a child process.

Server and cluster end with this process, even if it is killed: each holds the read end of a pipe
whose write end only this process has. A sentence says what a server that starts is doing.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from holdfast.errors import HoldfastError, ServerUnreachable
from holdfast.local_server import end_signals
from holdfast.schemas import ServerFile
from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import LocalCluster

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 45.0
LOOK_S = 0.1
SERVER_LOG = "server.log"
_OF_OTHER_SERVERS = (
    *("HOLDFAST_HOST", "HOLDFAST_ALLOWED_HOST", "HOLDFAST_AUTH", "HOLDFAST_KEYS_DIR"),
    "HOLDFAST_DATABASE_URL",
    *("HOLDFAST_RAY_", "HOLDFAST_SEND_OWN_CODE", "HOLDFAST_STORE_", "HOLDFAST_WEBHOOK_"),
)
"""Beginnings of settings that would let the child use another cluster, database or store."""


class ServerDidNotStart(HoldfastError, code="server_did_not_start"):
    """The child process did not report that it serves."""


class ServerEnded(HoldfastError, code="server_ended"):
    """The child process ended while it was used."""


@contextlib.contextmanager
def temporary_server(nodes: int) -> Iterator[ServerFile]:
    """A server with a data directory of its own, which is removed afterwards; its token is there,
    in `server.json`."""
    data_dir = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        with child_server(data_dir, nodes) as server:
            yield server
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)


@contextlib.contextmanager
def child_server(
    data_dir: Path, nodes: int, on_look: Callable[[], None] = lambda: None
) -> Iterator[ServerFile]:
    """A server on a free port, with its data in `data_dir`; afterwards it has ended, with its
    cluster.

    `on_look` is called several times a second until the server is there. During the clean-up,
    signals are ignored. Call it in the main thread. Raises ServerDidNotStart, and ServerEnded if
    the server has ended by itself.
    """
    log = data_dir / SERVER_LOG
    process: subprocess.Popen[str] | None = None
    try:
        process = _start(data_dir, nodes, log)
        server = _wait_until_ready(process, log, on_look)
        try:
            yield server
        except ServerUnreachable as error:
            if process.poll() is None:
                raise
            raise ServerEnded(
                f"the server of this command has ended with status {process.returncode}; the end "
                f"of its log {log}:\n{_tail(log)}"
            ) from error
    finally:
        with end_signals.ignored():
            _stop(process)
            local_cluster.stop(data_dir)


def own_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: without settings that belong to another server."""
    return {name: text for name, text in environ.items() if not name.startswith(_OF_OTHER_SERVERS)}


def _start(data_dir: Path, nodes: int, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0"),
                *("--data-dir", str(data_dir), "--local-nodes", str(nodes), "--end-with-stdin"),
            ],
            stdin=subprocess.PIPE,  # nothing is written; the kernel closes it with this process
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=own_settings(os.environ),
            start_new_session=True,  # only this process receives Ctrl-C
        )


def _wait_until_ready(
    process: subprocess.Popen[str], log: Path, on_look: Callable[[], None]
) -> ServerFile:
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], LOOK_S)[0]:
            line = process.stdout.readline()
            if not line:
                break
            return ServerFile.model_validate_json(line)
        on_look()
    raise ServerDidNotStart(
        f"`holdfast serve` did not start; the end of its log {log}:\n{_tail(log)}"
    )


def _stop(process: subprocess.Popen[str] | None) -> None:
    if process is None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for end in (process.stdin, process.stdout):
        if end is not None:
            end.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def stage(data_dir: Path, nodes: int) -> str:
    """What the server with this data directory and a cluster of `nodes` is doing, for the user who
    waits."""
    return stage_text(local_cluster.folder(data_dir).read(), nodes)


def stage_text(cluster: LocalCluster | None, nodes: int) -> str:
    """`cluster`: as its keeper has recorded it; None: not yet."""
    if cluster is None:
        return "starting a server on this machine"
    if cluster.ready:
        return "connecting to Ray"
    if not cluster.nodes:
        return "starting Ray"
    return f"starting Ray: {len(cluster.nodes)} of {nodes + 1} raylets run"
