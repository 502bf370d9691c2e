"""Positions of listeners in a live stream, and the messages sent to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from holdfast_service.views.live import LiveReset


@dataclass(frozen=True)
class JobPosition:
    """The position within one job, in numbers of the store."""

    event: int = 0
    attempt: int = 0
    step: int = 0
    line: int = 0


@dataclass(frozen=True)
class Position:
    """The position of a listener: in the rows of the hub `hub`, and in the job that it watches."""

    hub: str
    row: int
    """Number of the last row on that hub."""
    changed: int
    """All rows with lower change numbers were sent."""
    job: str = "-"
    at: JobPosition = JobPosition()

    def moved(self, **numbers: int) -> Position:
        """This position with other numbers in the job."""
        return replace(self, at=replace(self.at, **numbers))

    def cursor(self) -> str:
        numbers = astuple(self.at)
        return ".".join(map(str, (self.hub, self.row, self.changed, self.job, *numbers)))

    @classmethod
    def parse(cls, cursor: str) -> Position | None:
        """The position in a cursor string; None if the string is not a cursor of such a stream."""
        parts = cursor.split(".")
        if len(parts) != 8 or len(cursor) > 300 or not cursor.isascii():
            return None
        hub, row, changed, job, *numbers = parts
        fields = [row, changed, *numbers]
        if not all(field.isdigit() and len(field) < 19 for field in fields):
            return None
        return cls(hub, int(row), int(changed), job, JobPosition(*map(int, numbers)))


@dataclass(frozen=True)
class StreamMessage:
    """A message: its kind, its JSON payload, and the listener's position after receiving it."""

    kind: str
    payload: str
    position: Position


class Batch:
    """Messages that are sent together. They are encoded once, for any number of listeners."""

    def __init__(self, messages: Sequence[StreamMessage]) -> None:
        self.messages = tuple(messages)

    @cached_property
    def encoded(self) -> bytes:
        """The messages as server-sent events."""
        return "".join(
            f"id: {message.position.cursor()}\nevent: {message.kind}\ndata: {message.payload}\n\n"
            for message in self.messages
        ).encode()


def reset(reason: str, position: Position) -> StreamMessage:
    """A message that asks the listener to fetch everything again."""
    return StreamMessage("reset", LiveReset(reason=reason).model_dump_json(), position)


NOTHING = Batch(())
