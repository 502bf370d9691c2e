"""Fixtures of the memory tests: layouts, payloads, commits, and agents as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast_workers.memory.segment import Commit, Segment
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout, TensorEntry

SECRET = b"the secret of this job"
MESH = "dp_shard=2,tp=2"


def layout_of(nbytes: int) -> StateLayout:
    entry = TensorEntry("w", "uint8", (nbytes,), (0,), (nbytes,), 0, nbytes)
    return StateLayout((entry,), nbytes)


def content(nbytes: int, attempt: int, step: int) -> bytes:
    return np.random.default_rng((attempt, step)).bytes(nbytes)


def write(segment: Segment, attempt: int, step: int, keep: Commit | None = None) -> Commit:
    """Commit `content(...)` of this attempt and step, beside `keep`."""
    raw = content(segment.layout.payload_bytes, attempt, step)
    with segment.begin(step, keep=keep) as slot:
        slot[:] = raw
    return segment.commit(attempt=attempt, step=step, digest=payload_digest(raw))


_AGENT = """
import json, sys
from pathlib import Path
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.peer_tls import peer_tls
from holdfast_workers.memory.segment_store import SegmentStore
from tests.support.memory.shm import MESH, SECRET
server = DataServer(
    SegmentStore(Path(sys.argv[1]), MESH),
    SECRET,
    "127.0.0.1",
    heartbeat_s=float(sys.argv[2]),
    tls=peer_tls(sys.argv[3]),
)
print(json.dumps({"port": server.port}), flush=True)
sys.stdin.read()
"""


@dataclass
class AgentProcess:
    """A data server in its own process, like that of a node agent."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(cls, root: Path, heartbeat_s: float = 0.1, tls_dir: str = "") -> AgentProcess:
        process = subprocess.Popen(
            [sys.executable, "-c", _AGENT, str(root), str(heartbeat_s), tls_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((".", *sys.path))},
        )
        assert process.stdout is not None
        return cls(process, json.loads(process.stdout.readline())["port"])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
