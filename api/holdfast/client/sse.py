"""Reads server-sent events from lines; knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    id: int
    event: str
    payload: str


@dataclass
class Reader:
    """Takes lines one by one, gives out whole messages only."""

    _number: int = 0
    _event: str = ""
    _payload: list[str] = field(default_factory=list)

    def take(self, line: str) -> Message | None:
        """The message that this line completes, if it does."""
        if not line:
            done = Message(self._number, self._event, "\n".join(self._payload))
            whole = bool(self._payload)
            self._event, self._payload = "", []
            return done if whole else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isdigit():
            self._number = int(value)
        elif name == "event":
            self._event = value
        elif name == "data":
            self._payload.append(value)
        return None


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """Whole messages only: one cut off by a broken connection is not given out."""
    reader = Reader()
    for line in lines:
        if (message := reader.take(line)) is not None:
            yield message
