"""The example of log shipping takes the lines that servers and nodes write, and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).parents[2] / "deploy/logs/rsyslog.conf"
NOT_THERE = "rsyslogd is not installed (Debian: rsyslog)"
ROUND_S = 60.0


@pytest.fixture
def daemon() -> str:
    found = shutil.which("rsyslogd", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None and os.environ.get("HOLDFAST_NO_SKIPS"):
        pytest.fail(NOT_THERE)
    return found or pytest.skip(NOT_THERE)


@pytest.fixture
def collector() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ROUND_S)
        yield listener


def written_by(fields: dict[str, str], call: str) -> str:
    program = f"""
import structlog
from holdfast_workers.log_setup import configure
configure(json_fields={fields})
structlog.get_logger().{call}
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr


def test_lines_of_server_and_nodes_reach_a_collector(
    daemon: str, collector: socket.socket, tmp_path: Path
) -> None:
    logs = tmp_path / "session_2026-01-01/logs"
    logs.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(logs.parent)
    other = '[core] a line of Ray\n{"from": "another program"}\n'
    of_node = written_by({"job": "j1", "node": "node0"}, 'warning("rank_stalled", rank=3)')
    (logs / "worker-1.err").write_text(other + of_node)
    (tmp_path / "serve.log").write_text(written_by({}, 'error("request_failed")'))
    text = CONFIG.read_text()
    for old, new in (
        ("/var/log/holdfast", str(tmp_path)),
        ("/tmp/ray", str(tmp_path)),
        ('"logs.internal"', '"127.0.0.1"'),
        ('"5170"', f'"{collector.getsockname()[1]}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "rsyslog.conf"
    config.write_text(f'global(workDirectory="{tmp_path}")\n{text}')
    command = [daemon, "-n", "-f", str(config), "-i", str(tmp_path / "pid")]
    with subprocess.Popen(command) as running:
        try:
            received = lines(collector, 2)
        finally:
            running.terminate()
            running.wait(60)
    node, server = sorted(received, key=lambda line: line["event"])
    stalled = {"event": "rank_stalled", "rank": 3, "job": "j1", "source": "holdfast-node"}
    assert stalled.items() <= node.items()
    failed = {"event": "request_failed", "level": "error", "source": "holdfast-serve"}
    assert failed.items() <= server.items()
    assert node["machine"] and node["at"] > 0


def lines(collector: socket.socket, number: int) -> list[dict[str, Any]]:
    connection, _ = collector.accept()
    with connection, connection.makefile("r") as stream:
        connection.settimeout(ROUND_S)
        return [json.loads(line) for line in itertools.islice(stream, number)]
