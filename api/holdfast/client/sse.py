"""Lines of a text that comes in pieces, server-sent events of lines; knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


class Lines:
    """Cuts a text that comes in pieces at its line feeds, and nowhere else.

    `str.splitlines` would cut at U+2028, U+2029 and U+0085 too, which JSON holds as they are.
    """

    def __init__(self) -> None:
        self._begun: list[str] = []

    def take(self, text: str) -> list[str]:
        """The lines that this piece completes."""
        *whole, rest = text.split("\n")
        if whole:
            whole[0] = "".join([*self._begun, whole[0]])
            self._begun.clear()
        if rest:
            self._begun.append(rest)
        return [line.removesuffix("\r") for line in whole]

    def rest(self) -> list[str]:
        """The last line, if the text ended without a line feed."""
        return ["".join(self._begun)] if self._begun else []


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
