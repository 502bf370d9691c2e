"""The lower bound for the cost of a memory checkpoint with one partner copy on this machine.

All ranks run at once, with nothing else running: each copies its bytes to warm shared memory,
computes their digest, and sends them over loopback into warm memory. The three parts run one
after the other; the result is the median of each, in seconds, over `ROUNDS` rounds.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch.distributed as dist
import xxhash
from tests.support.programs.tier_worlds import TierWorlds

ROUNDS = 7
PIECE = 1 << 20


def floor(ranks: int, nbytes: int, folder: Path) -> dict[str, float]:
    """Seconds of `copy`, `digest` and `send`."""
    rows = [row for rows in TierWorlds(folder).run(_rows, ranks, nbytes) for row in rows]
    return {name: median(row[name] for row in rows) for name in ("copy", "digest", "send")}


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`, which all ranks begin together."""
    dist.barrier()
    began = perf_counter()
    work()
    return perf_counter() - began


def loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def stream(
    pair: tuple[socket.socket, socket.socket], source: memoryview, target: memoryview
) -> None:
    """Send all of `source` through the pair into `target`."""

    def send() -> None:
        for start in range(0, len(source), PIECE):
            pair[0].sendall(source[start : start + PIECE])

    sender = threading.Thread(target=send)
    sender.start()
    filled = 0
    while filled < len(target):
        filled += pair[1].recv_into(target[filled:])
    sender.join()


def _rows(rank: int, nbytes: int) -> list[dict[str, float]]:
    """Runs in each rank."""
    source = np.ones(nbytes, dtype=np.uint8)
    shared = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    kept = np.zeros(nbytes, dtype=np.uint8)
    shared[:] = 0
    pair = loopback()
    return [
        {
            "copy": timed(lambda: np.copyto(shared, source)),
            "digest": timed(lambda: xxhash.xxh3_128_digest(shared.data)),
            "send": timed(lambda: stream(pair, shared.data, kept.data)),
        }
        for _ in range(ROUNDS)
    ]
