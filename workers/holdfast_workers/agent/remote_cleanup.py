"""A node's part in tidying the remote tier: one tidier at a time, beside everything else.

A tidier may read a whole checkpoint through, so it has a deadline far from that of a publication.
Of the orders that come meanwhile only the newest is carried out: it knows all that the others knew.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection
from typing import Any

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.ipc import control_channel
from holdfast_workers.ipc.children import Brood, ZygoteFailed
from holdfast_workers.ipc.io_loop import NodeIO
from holdfast_workers.protocol.messages import SignalKind


class Tidier:
    """Thread-safe. One thread of its own waits for the tidiers."""

    def __init__(self, config: AgentConfig, brood: Brood, teller: Teller) -> None:
        self._config = config
        self._brood = brood
        self._teller = teller
        self._io: NodeIO | None = None
        self._changed = threading.Condition()
        self._wanted: dict[str, Any] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tidier", daemon=True)

    def start(self, io: NodeIO) -> None:
        self._io = io
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def ask(
        self,
        attempt: int,
        step: int,
        unfinished: Collection[tuple[int, int]],
        bad: Collection[str],
    ) -> None:
        """Tidy as soon as the tidier that is at work has ended; a signal tells of it."""
        with self._changed:
            self._wanted = {
                "attempt": attempt,
                "step": step,
                "unfinished": list(unfinished),
                "bad": sorted(bad),
                "rules": self._config.training["checkpoint"]["remote"],
            }
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted is not None)
                if self._closing:
                    return
                request, self._wanted = self._wanted, None
            assert request is not None
            answer = self._tidy(request)
            detail = {"step": request["step"], "deleted": {}, "message": "", **answer}
            self._teller.tell(SignalKind.TIDIED, request["attempt"], detail=detail)

    def _tidy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one tidier to its end: what it answered, or why it did not."""
        assert self._io is not None
        try:
            child = self._brood.fork("tidier", f"tidier-{request['step']}", request)
            return self._io.run_to_end(child, self._config.tidy_timeout_s)
        except TimeoutError:
            return {"message": f"not through within {self._config.tidy_timeout_s:g} s"}
        except (ZygoteFailed, OSError) as error:
            traceback.print_exc()
            return {"message": control_channel.shortened(str(error))}
