"""Sends a node agent's observations to its supervisor, as numbered signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast_workers.protocol.signals import Signal, SignalDetail


class SignalSender:
    """Numbers signals and passes them to `on_signal`, which several threads call and which must
    not block."""

    def __init__(self, agent: str, incarnation: str, on_signal: Callable[[Signal], None]) -> None:
        self._agent = agent
        self._incarnation = incarnation
        self._on_signal = on_signal
        self._lock = threading.Lock()
        self._last_number = 0

    def send(
        self,
        detail: SignalDetail,
        attempt: int,
        rank: int | None = None,
        worker: str | None = None,
        *,
        pid: int | None = None,
    ) -> None:
        """Send a signal about `attempt`."""
        with self._lock:
            self._last_number += 1
            seq = self._last_number
        self._on_signal(
            Signal(
                detail=detail,
                agent=self._agent,
                incarnation=self._incarnation,
                seq=seq,
                at=time.time(),
                attempt=attempt,
                rank=rank,
                worker=worker,
                pid=pid,
            )
        )
