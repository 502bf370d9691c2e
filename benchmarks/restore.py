"""The speed of restoring a rank's state from a partner's memory, against a raw loopback stream.

    python -m benchmarks.restore --json [--state-mb M] [--rounds N]

A node agent's data server in another process holds the state. This process fetches the state into
its own segment as an agent does for its rank: authenticated, hashed on arrival, committed.
Alternating with that, the other process sends the same number of bytes from memory to memory over a
plain connection, without checks or storage. Both write to warm memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.conditions import machine, print_json, report
from holdfast_workers.memory.data_server import DataServer
from holdfast_workers.memory.fetch import fetch
from holdfast_workers.memory.segment import Commit
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.protocol.messages import Place, Restore, Tier
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.state.layout import StateLayout, TensorEntry

SECRET = b"a benchmark's secret"
MESH = "dp_shard=2"
SENT_PIECE = 4 << 20
RECEIVED_PIECES = (128 << 10, 1 << 20)
"""Receive sizes of the raw stream: it is timed with each size, and the fastest counts."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RestoreResult:
    """The last line: medians, and the speed of each fetch relative to the raw stream just before
    it."""

    ratio: float
    round_ratios: list[float]
    fetch_mb_per_s: float
    raw_mb_per_s: float


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report(f"{options.rounds} rounds of {options.state_mb} MB; {machine()}")
    found = summary(*measure(options.state_mb << 20, options.rounds), options.state_mb << 20)
    report(
        f"fetch {found.fetch_mb_per_s:.0f} MB/s, raw {found.raw_mb_per_s:.0f} MB/s, "
        f"ratio {found.ratio:.3f}"
    )
    if options.json:
        print_json(found)
    return 0


def summary(fetches_s: list[float], raws_s: list[float], nbytes: int) -> RestoreResult:
    ratios = [raw / fetch_s for fetch_s, raw in zip(fetches_s, raws_s, strict=True)]
    return RestoreResult(
        ratio=round(median(ratios), 4),
        round_ratios=[round(ratio, 3) for ratio in ratios],
        fetch_mb_per_s=round(nbytes / median(fetches_s) / 1e6, 1),
        raw_mb_per_s=round(nbytes / median(raws_s) / 1e6, 1),
    )


def measure(nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each fetch and of each raw stream; the two alternate."""
    root = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    partner = context.Process(target=_partner, args=(str(root / "partner"), nbytes, theirs))
    partner.start()
    try:
        port, raw_port, commits = ours.recv()
        store = SegmentStore(root / "own", MESH)
        target = np.zeros(nbytes, dtype=np.uint8)
        raw = socket.create_connection(("127.0.0.1", raw_port), TIMEOUT_S)
        fetches, raws = [], []
        for round_number in range(rounds + 1):
            raws.append(min(_stream(raw, target, piece) for piece in RECEIVED_PIECES))
            fetches.append(_fetch(store, port, commits[round_number % 2]))
        return fetches[1:], raws[1:]  # the first round allocates the memory and warms it
    finally:
        partner.kill()
        partner.join()
        shutil.rmtree(root, ignore_errors=True)


def _fetch(store: SegmentStore, port: int, commit: Commit) -> float:
    source = Restore(
        Tier.PARTNER_RAM,
        commit.step,
        commit.attempt,
        commit.digest,
        "partner",
        Place.REPLICA,
        "127.0.0.1",
        port,
    )
    began = time.perf_counter()
    fetch(SECRET, source, 0, store, TIMEOUT_S)
    took = time.perf_counter() - began
    segment = store.find(0, Place.OWN)
    assert segment is not None
    for stored in segment.commits():  # a commit already present would not be fetched again
        segment.quarantine(stored)
    return took


def _stream(sock: socket.socket, target: np.ndarray, piece: int) -> float:
    view = target.data
    began = time.perf_counter()
    sock.sendall(b"!")
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled : filled + piece])
        if not count:
            raise ConnectionError("the partner process ended")
        filled += count
    return time.perf_counter() - began


def _partner(root: str, nbytes: int, pipe: Connection) -> None:
    """Hold two states, serve them, and stream the same number of bytes on each request."""
    store = SegmentStore(Path(root), MESH)
    entry = TensorEntry("state", "uint8", (nbytes,), (0,), (nbytes,), 0, nbytes)
    segment = store.ensure(0, Place.REPLICA, StateLayout((entry,), nbytes))
    commits = []
    for step in (1, 2):
        with segment.begin(step) as slot:
            np.frombuffer(slot, np.uint8)[:] = np.random.default_rng(step).bytes(1 << 20)[step]
            digest = payload_digest(slot)
        commits.append(segment.commit(attempt=1, step=step, digest=digest))
    server = DataServer(store, SECRET, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.port, listener.getsockname()[1], commits))
        sock, _ = listener.accept()
        payload = segment.payload(commits[1])
        while sock.recv(1):
            for start in range(0, nbytes, SENT_PIECE):
                sock.sendall(payload[start : start + SENT_PIECE])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--state-mb", type=int, default=256, help="per rank; default 256")
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
