"""The lower bound for the cost of a memory checkpoint with one partner copy on this machine.

All ranks run at once, with nothing else running: each copies its bytes to warm shared memory,
computes their digest, and sends them over loopback into warm memory. The three parts run one
after the other; the result is the median of each, in seconds, over `ROUNDS` rounds.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median

import numpy as np
import xxhash

from holdfast_workers.ipc.children import COPY_TUNING

ROUNDS = 7
PIECE = 1 << 20


def floor(ranks: int, nbytes: int, *, partner: bool) -> dict[str, float]:
    """Seconds of `copy`, `digest`, `send` (0 without `partner`) and their sum, `total`."""
    for (
        name,
        value,
    ) in COPY_TUNING.items():  # as ranks have it; glibc reads it when a process starts
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    results = context.Queue()
    workers = [
        context.Process(target=_rank, args=(nbytes, partner, barrier, results))
        for _ in range(ranks)
    ]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=300) for _ in range(ranks * ROUNDS)]
    for worker in workers:
        worker.join()
    parts = {name: median(row[name] for row in rows) for name in ("copy", "digest", "send")}
    return {**parts, "total": sum(parts.values())}


def _rank(nbytes: int, partner: bool, barrier: Barrier, results: Queue[dict[str, float]]) -> None:
    source = np.ones(nbytes, dtype=np.uint8)
    shared = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    kept = np.zeros(nbytes, dtype=np.uint8)
    shared[:] = 0
    ours, theirs = _loopback()
    for _ in range(ROUNDS):
        row = {}
        barrier.wait(300)
        began = time.perf_counter()
        shared[:] = source
        row["copy"] = time.perf_counter() - began
        barrier.wait(300)
        began = time.perf_counter()
        xxhash.xxh3_128_digest(shared.data)
        row["digest"] = time.perf_counter() - began
        barrier.wait(300)
        began = time.perf_counter()
        if partner:
            _stream(ours, theirs, shared.data, kept.data)
        row["send"] = time.perf_counter() - began if partner else 0.0
        results.put(row)


def _loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def _stream(
    ours: socket.socket, theirs: socket.socket, source: memoryview, target: memoryview
) -> None:
    def send() -> None:
        for start in range(0, len(source), PIECE):
            ours.sendall(source[start : start + PIECE])

    sender = threading.Thread(target=send)
    sender.start()
    filled = 0
    while filled < len(target):
        filled += theirs.recv_into(target[filled:])
    sender.join()
