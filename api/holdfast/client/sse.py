"""Splits a stream of text into lines, and lines into server-sent events. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


class LineSplitter:
    """Splits a stream of text at line feeds only.

    `str.splitlines` would also split at U+2028, U+2029 and U+0085, which JSON contains unescaped.
    """

    def __init__(self) -> None:
        self._incomplete: list[str] = []

    def take(self, text: str) -> list[str]:
        """The lines that this piece completes."""
        *whole, rest = text.split("\n")
        if whole:
            whole[0] = "".join([*self._incomplete, whole[0]])
            self._incomplete.clear()
        if rest:
            self._incomplete.append(rest)
        return [line.removesuffix("\r") for line in whole]

    def rest(self) -> list[str]:
        """The last line, if the text ended without a line feed."""
        return ["".join(self._incomplete)] if self._incomplete else []


@dataclass(frozen=True)
class SseMessage:
    """One server-sent event."""

    id: int
    event: str
    payload: str


@dataclass
class MessageParser:
    """Assembles complete messages from lines."""

    _number: int = 0
    _event: str = ""
    _payload: list[str] = field(default_factory=list)

    def take(self, line: str) -> SseMessage | None:
        """The message that this line completes, if any."""
        if not line:
            done = SseMessage(self._number, self._event, "\n".join(self._payload))
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


def messages(lines: Iterable[str]) -> Iterator[SseMessage]:
    """Complete messages only: a message cut off by a broken connection is dropped."""
    parser = MessageParser()
    for line in lines:
        if (message := parser.take(line)) is not None:
            yield message
