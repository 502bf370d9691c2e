"""Reads server-sent events from lines; knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    id: int
    event: str
    payload: str


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """Whole messages only: one cut off by a broken connection is not given out."""
    number, event, payload = 0, "", list[str]()
    for line in lines:
        if not line:
            if payload:
                yield Message(number, event, "\n".join(payload))
            event, payload = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isdigit():
            number = int(value)
        elif name == "event":
            event = value
        elif name == "data":
            payload.append(value)
