"""How far a listener has come, and what is sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from holdfast_service.views.live import LiveReset


class OfJob(Protocol):
    """How far one job's news go, in numbers of the store."""

    @property
    def event(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def line(self) -> int: ...


@dataclass(frozen=True)
class Position:
    """How far a listener has come: of rows on the hub `hub`, and of the job it watches."""

    hub: str
    row: int
    """Number of the last row on that hub."""
    changed: int
    """Change number up to which rows were looked for."""
    job: str = "-"
    event: int = 0
    attempt: int = 0
    step: int = 0
    line: int = 0

    def moved(self, to: OfJob) -> Position:
        """The same rows, and the job as far as `to`."""
        return replace(self, event=to.event, attempt=to.attempt, step=to.step, line=to.line)

    def cursor(self) -> str:
        return (
            f"{self.hub}.{self.row}.{self.changed}.{self.job}"
            f".{self.event}.{self.attempt}.{self.step}.{self.line}"
        )

    @classmethod
    def of(cls, cursor: str) -> Position | None:
        """None for what is no cursor of such a stream."""
        parts = cursor.split(".")
        if len(parts) != 8 or len(cursor) > 300 or not cursor.isascii():
            return None
        hub, row, changed, job, *numbers = parts
        told = [row, changed, *numbers]
        if not all(one.isdigit() and len(one) < 19 for one in told):
            return None
        event, attempt, step, line = map(int, numbers)
        return cls(hub, int(row), int(changed), job, event, attempt, step, line)


@dataclass(frozen=True)
class Message:
    """`kind` and JSON, and the position of whoever has got it."""

    kind: str
    payload: str
    position: Position


class Batch:
    """Messages that belong together; what is made of them for the wire is made once, however many
    listeners get them."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = tuple(messages)

    @cached_property
    def encoded(self) -> bytes:
        """As server-sent events."""
        return "".join(
            f"id: {one.position.cursor()}\nevent: {one.kind}\ndata: {one.payload}\n\n"
            for one in self.messages
        ).encode()


def reset(reason: str, position: Position) -> Message:
    """The listener is to read anew."""
    return Message("reset", LiveReset(reason=reason).model_dump_json(), position)


NOTHING = Batch(())
