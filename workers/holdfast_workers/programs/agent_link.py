"""The launcher's messages to its agent, sent without ever waiting for the agent to read them."""

from __future__ import annotations

import socket
from collections import deque

from holdfast_workers.ipc import control_channel
from holdfast_workers.protocol.processes import StepReport, WorkerMessage

MOST_WAITING = 10_000
"""Number of waiting messages beyond which the oldest step reports are dropped."""


class AgentLink:
    """Raises ControlClosed in every call once the agent has ended."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[WorkerMessage] = deque()

    @property
    def is_full(self) -> bool:
        """Whether messages wait until the agent reads."""
        return bool(self._waiting)

    def send(self, message: WorkerMessage) -> None:
        """Send the message now, or as soon as the agent has read those before it."""
        self._waiting.append(message)
        if len(self._waiting) > MOST_WAITING:
            self._drop_step()
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._waiting:
            try:
                control_channel.send(self._end, self._waiting[0], wait=False)
            except BlockingIOError:
                return
            self._waiting.popleft()

    def _drop_step(self) -> None:
        for index, message in enumerate(self._waiting):
            if isinstance(message, StepReport):
                del self._waiting[index]
                return
