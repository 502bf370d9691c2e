"""What TLS between nodes costs: pushes of a state, and new connections.

    python -m benchmarks.channel_tls --json [--state-mb N] [--rounds N]

A replicator in this process pushes a rank's state to data servers in processes of their own, over
loopback, where the network itself is hardly a limit: with a server that uses TLS and with one that
does not, in turns. Each push is of another step, hashed and committed as in training. Then as many
connections are made to each, with all of their handshakes.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.support.memory.certificates import certified, new_authority
from tests.support.memory.shm import MESH, SECRET, AgentProcess, layout_of, write

from benchmarks.conditions import (
    add_idle_options,
    machine,
    print_json,
    report,
    wait_for_idle_machine,
)
from holdfast_workers.memory import wire
from holdfast_workers.memory.peer_tls import PeerTls, peer_tls
from holdfast_workers.memory.replicate import Replicator
from holdfast_workers.memory.segment import Segment
from holdfast_workers.memory.segment_store import SegmentStore
from holdfast_workers.memory.wire import DEFAULT_TIMEOUTS, Role
from holdfast_workers.protocol.messages import Partner, Place

PUSH_S = 120.0


@dataclass(frozen=True)
class ChannelTlsResult:
    """The last line: medians; `ratio` of the rates, with TLS to without."""

    ratio: float
    plain_gb_per_s: float
    tls_gb_per_s: float
    plain_connect_ms: float
    tls_connect_ms: float
    rounds: int


class Side:
    """A replicator with its partner, whose data server is another process."""

    def __init__(self, root: Path, name: str, segment: Segment, store: SegmentStore, folder: str):
        self.times_s: list[float] = []
        self._tls: PeerTls | None = peer_tls(folder)
        self._segment = segment
        self._server = AgentProcess.start(root / name, tls_dir=folder)
        self._done: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        self._replicator = Replicator(
            store,
            SECRET,
            lambda _, commit: self._done.put(commit.step),
            lambda _rank, _partner, reason, _others: self._done.put(reason),
            tls=self._tls,
        )
        self._replicator.set_partners(0, (Partner(name, "127.0.0.1", self._server.port),))

    def push(self, step: int) -> None:
        """Raises RuntimeError if the push fails."""
        began = time.perf_counter()
        self._replicator.offer(0, 1, step)
        done = self._done.get(timeout=PUSH_S)
        self.times_s.append(time.perf_counter() - began)
        if done != step:
            raise RuntimeError(f"the push of step {step} ended with {done}")

    def connect(self) -> float:
        began = time.perf_counter()
        wire.connect(
            SECRET, "127.0.0.1", self._server.port, Role.PUSH, DEFAULT_TIMEOUTS, tls=self._tls
        ).close()
        return time.perf_counter() - began

    def close(self) -> None:
        self._replicator.close()
        self._server.end()


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    report("conditions: " + ", ".join(f"{name} {value}" for name, value in machine().items()))
    wait_for_idle_machine(options.quiet, options.patience_s)
    with tempfile.TemporaryDirectory(prefix="holdfast-tls-", dir="/dev/shm") as root:
        result = _measured(Path(root), options.state_mb * 10**6, options.rounds)
    report(f"with TLS {result.tls_gb_per_s} GB/s, without {result.plain_gb_per_s} GB/s")
    if options.json:
        print_json(result)
    return 0


def _measured(root: Path, nbytes: int, rounds: int) -> ChannelTlsResult:
    folder = str(certified(root / "tls", new_authority()))
    store = SegmentStore(root / "own", MESH)
    segment = store.ensure(0, Place.OWN, layout_of(nbytes))
    sides = [
        Side(root, name, segment, store, tls) for name, tls in (("plain", ""), ("tls", folder))
    ]
    try:
        for step in range(1, rounds + 2):
            write(segment, 1, step)
            for side in sides if step % 2 else sides[::-1]:
                side.push(step)
        connects = [[side.connect() for side in sides] for _ in range(20)]
    finally:
        for side in sides:
            side.close()
    # The first push also connects, and the partner allocates its segment.
    plain_s, tls_s = (median(side.times_s[1:]) for side in sides)
    plain_ms, tls_ms = (median(times) * 1e3 for times in zip(*connects, strict=True))
    return ChannelTlsResult(
        ratio=round(plain_s / tls_s, 3),
        plain_gb_per_s=round(nbytes / plain_s / 1e9, 3),
        tls_gb_per_s=round(nbytes / tls_s / 1e9, 3),
        plain_connect_ms=round(plain_ms, 2),
        tls_connect_ms=round(tls_ms, 2),
        rounds=rounds,
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What TLS between nodes costs.")
    parser.add_argument("--state-mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    add_idle_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
