"""The links of a launcher: to its agent, and to the rendezvous store of an attempt.

The link to the store shows when the store has ended: ranks that have not met by then wait for it
for minutes. Nothing is sent over it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque

from holdfast_workers.errors import WorkersError
from holdfast_workers.ipc import control_channel, readiness
from holdfast_workers.protocol.processes import StepReport, WorkerMessage

MOST_WAITING = 10_000
"""Number of waiting messages beyond which the oldest step reports are dropped."""


class AgentLink:
    """The launcher's messages to its agent, sent without ever waiting for the agent to read them.
    Raises ControlClosed in every call once the agent has ended."""

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

    def finish(self, within_s: float) -> None:
        """Wait for the agent to read all messages: there is no later call."""
        deadline = time.monotonic() + within_s
        while self._waiting and (left_s := deadline - time.monotonic()) > 0:
            readiness.is_writable(self._end, left_s)
            self.flush()

    def _drop_step(self) -> None:
        for index, message in enumerate(self._waiting):
            if isinstance(message, StepReport):
                del self._waiting[index]
                return


CONNECT_S = 5.0
"""How long the store's node may take to answer."""
MEETING_S = 1800.0
"""How long ranks that never show a step may take to meet: the default time-out of torch's process
groups. Later, the store's end is none of the program's."""


class StoreEnded(WorkersError):
    """The store of an attempt does not listen any more."""


def connect(host: str, port: int) -> socket.socket:
    """Raises StoreEnded."""
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise StoreEnded(f"no rendezvous store listens on {host}:{port}: {error}") from error


def has_ended(link: socket.socket) -> bool:
    """Whether the store has closed the readable connection."""
    with contextlib.suppress(OSError):  # reset
        return not link.recv(1)
    return True
