"""Where the time of a job went, exactly: every moment that it held resources is of one kind. Pure.

Promises: the kinds sum to the time held, to the microsecond; a step counts as productive once, in
the attempt whose computation is part of history; every moment that is lost is put down to one
incident, or to none; time off the cluster (queued, paused) is no loss and counts for nothing.
Everything follows from what is stored: rows of steps, attempts, incidents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast_service.policy.incidents import PHASES


class Kind(StrEnum):
    """What a moment was spent on. Phases of a recovery are `recovery.<phase>`."""

    PRODUCTIVE = "productive"  # in a step that is part of history
    BETWEEN_STEPS = "between_steps"  # between two steps of one attempt: saving, logging
    REPLAYED = "replayed"  # in a step that had to be made again, and was lost
    STARTING = "starting"  # on the cluster, before the first step
    DETECTION = "detection"  # from the last finished step to the first signal of a fault
    RECOVERING = "recovery.other"  # from the signal to the first new step, beside its phases
    FINISHING = "finishing"  # after the last step: its checkpoint


RECOVERY = "recovery."


def is_lost(kind: str) -> bool:
    """Whether time of this kind was lost to a fault."""
    return kind in (Kind.REPLAYED, Kind.DETECTION) or kind.startswith(RECOVERY)


@dataclass(frozen=True)
class Row:
    """A step that was committed. `at`: its end."""

    attempt: int
    step: int
    at: float
    step_time_s: float


@dataclass(frozen=True)
class Stretch:
    """Steps of one attempt without a gap in their account, summed. `since`: the first one's
    beginning; `at`: the last one's end; `busy_s`: in the steps themselves."""

    attempt: int
    first: int
    last: int
    since: float
    at: float
    busy_s: float
    steps: int


@dataclass(frozen=True)
class Span:
    """Time of one kind; consecutive time in steps and between them is one span."""

    kind: str
    since: float
    until: float
    incident: int | None


@dataclass(frozen=True)
class Run:
    """An attempt that made steps, and the step that it started from."""

    attempt: int
    restored_step: int
    incident: int | None = None
    """Which incident made it necessary; None: none."""


@dataclass(frozen=True)
class Outage:
    """An incident that ended attempts, from the first signal to the first new step."""

    signalled_at: float
    closed_at: float | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    incident: int | None = None
    """Its number."""


@dataclass(frozen=True)
class Goodput:
    """Seconds by kind. They sum to `held_s`."""

    held_s: float
    by_kind_s: Mapping[str, float]
    steps: int
    """Steps that are part of history."""
    steps_replayed: int
    lost_s: Mapping[int | None, float] = field(default_factory=dict)
    """Incident → what it cost; None: no incident tells of it, as when a job begins again because
    all that it had on the cluster is gone. They sum to the kinds that are lost."""
    spans: tuple[Span, ...] = ()
    """The same time in its order."""

    @property
    def goodput(self) -> float | None:
        """Time in steps that are part of history, over the time held; None before any."""
        return self.by_kind_s[Kind.PRODUCTIVE] / self.held_s if self.held_s else None

    @property
    def effective_training_time_ratio(self) -> float | None:
        """Time in which training advanced, between steps too, over the time held."""
        if not self.held_s:
            return None
        useful = self.by_kind_s[Kind.PRODUCTIVE] + self.by_kind_s[Kind.BETWEEN_STEPS]
        return useful / self.held_s


def account(
    held: Sequence[tuple[float, float]],
    rows: Iterable[Row | Stretch],
    runs: Sequence[Run],
    outages: Sequence[Outage],
    *,
    ended: bool,
) -> Goodput:
    """`held`: when the job had resources, in order; a live job's last one ends now. A stretch must
    be wholly part of history, or wholly taken back by one attempt: see `History.is_one`."""
    history = History(runs)
    ordered = sorted(
        (_stretch(row) for row in rows), key=lambda one: (one.at, one.attempt, one.first)
    )
    book = _Book(_pieces(outages, held[-1][1] if held else 0.0))
    at = 0
    for number, (since, until) in enumerate(held):
        begin = at
        while at < len(ordered) and (ordered[at].at <= until or number == len(held) - 1):
            at += 1
        over = ended or number < len(held) - 1
        book.enter(_us(since), _us(until), ordered[begin:at], history, over=over)
    held_us = sum(book.spent.values())
    return Goodput(
        held_s=held_us / 1e6,
        by_kind_s={kind: us / 1e6 for kind, us in book.spent.items()},
        steps=book.steps,
        steps_replayed=book.replayed,
        lost_s={incident: us / 1e6 for incident, us in book.lost.items()},
        spans=tuple(
            Span(kind, since / 1e6, until / 1e6, incident)
            for kind, since, until, incident in book.spans
        ),
    )


def _stretch(row: Row | Stretch) -> Stretch:
    if isinstance(row, Stretch):
        return row
    since = row.at - row.step_time_s
    return Stretch(row.attempt, row.step, row.step, since, row.at, row.step_time_s, 1)


Piece = tuple[int, int, str, int | None]
"""Start, end, phase, incident."""


class _Book:
    """Gives each microsecond to one kind. `pieces`: of recoveries, in order, none overlapping."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._next = 0
        self.spent: dict[str, int] = {kind.value: 0 for kind in Kind}
        self.lost: dict[int | None, int] = {}
        self.steps = 0
        self.replayed = 0
        self.spans: list[tuple[str, int, int, int | None]] = []
        self._at = 0

    def enter(
        self, since: int, until: int, rows: Sequence[Stretch], history: History, *, over: bool
    ) -> None:
        """Some time with resources, and the steps that ended in it."""
        cursor, before = since, None
        self._at = since
        for row in rows:
            end = min(max(_us(row.at), cursor), until)
            start = max(end - (_us(row.at) - _us(row.since)), cursor)
            idle = max(0, (_us(row.at) - _us(row.since)) - _us(row.busy_s))
            idle = min(idle, end - start) if row.steps > 1 else 0
            if before == row.attempt:
                self._spend(Kind.BETWEEN_STEPS, start - cursor)
            else:
                first = Kind.STARTING if before is None else Kind.DETECTION
                self._gap(cursor, start, first, Kind.RECOVERING)
            self._spend(Kind.BETWEEN_STEPS, idle)
            if history.keeps(row.attempt, row.last):
                self._spend(Kind.PRODUCTIVE, end - start - idle)
                self.steps += row.steps
            else:
                taken_back_by = history.taken_back_by(row.attempt, row.last)
                self._spend(Kind.REPLAYED, end - start - idle, taken_back_by)
                self.replayed += row.steps
            cursor, before = end, row.attempt
        if before is None:
            self._gap(cursor, until, Kind.STARTING, Kind.STARTING)
        else:
            rest = Kind.FINISHING if over else Kind.BETWEEN_STEPS
            self._gap(cursor, until, rest, Kind.RECOVERING if not over else rest)

    def _gap(self, since: int, until: int, before: Kind, after: Kind) -> None:
        """Time without steps: as the recoveries in it tell; `before` the first, `after` others.
        What is lost before the first one, its fault had cost already."""
        cursor, kind, incident = since, before, None
        while self._next < len(self._pieces) and self._pieces[self._next][1] <= cursor:
            self._next += 1
        at = self._next
        while at < len(self._pieces) and self._pieces[at][0] < until:
            start, end, phase, of = self._pieces[at]
            start, end = max(start, cursor), min(end, until)
            if at == self._next:
                incident = of
                if start > cursor and kind is not Kind.STARTING:
                    kind = Kind.DETECTION
            self._spend(kind, start - cursor, incident)
            self._spend(phase, end - start, of)
            cursor, kind, incident, at = max(end, cursor), after, of, at + 1
        self._spend(kind, until - cursor, incident)

    def _spend(self, kind: str, microseconds: int, incident: int | None = None) -> None:
        """`incident`: to which it is put down, if it is lost."""
        if microseconds <= 0:
            return
        self.spent[str(kind)] = self.spent.get(str(kind), 0) + microseconds
        if is_lost(kind):
            self.lost[incident] = self.lost.get(incident, 0) + microseconds
        self._note(str(kind), microseconds, incident)

    def _note(self, kind: str, microseconds: int, incident: int | None) -> None:
        """The spans in their order. What lies between two steps belongs to the steps around it."""
        since, self._at = self._at, self._at + microseconds
        last = self.spans[-1] if self.spans else None
        together = last is not None and last[2] == since
        if together and last is not None:
            same = last[0] == kind and last[3] == incident
            if same or (kind == Kind.BETWEEN_STEPS and last[0] in _IN_STEPS):
                self.spans[-1] = (last[0], last[1], self._at, last[3])
                return
            if last[0] == Kind.BETWEEN_STEPS and kind in _IN_STEPS:
                self.spans[-1] = (kind, last[1], self._at, incident)
                return
        self.spans.append((kind, since, self._at, incident))


_IN_STEPS = (Kind.PRODUCTIVE, Kind.REPLAYED)


class History:
    """Which steps are part of history, and why others are not."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = sorted(runs, key=lambda one: one.attempt)
        self._floors: dict[int, int] = {}
        lowest: int | None = None
        for run in reversed(self._runs):
            if lowest is not None:
                self._floors[run.attempt] = lowest
            lowest = run.restored_step if lowest is None else min(lowest, run.restored_step)

    def keeps(self, attempt: int, step: int) -> bool:
        """Whether no later attempt has started before that step."""
        return step <= self._floors.get(attempt, step)

    def taken_back_by(self, attempt: int, step: int) -> int | None:
        """The incident of the first attempt that started before a step that is not kept."""
        run = self._first_before(attempt, step)
        return run.incident if run is not None else None

    def is_one(self, attempt: int, first: int, last: int) -> bool:
        """Whether the same became of all steps from `first` to `last` of an attempt."""
        return self._first_before(attempt, first) == self._first_before(attempt, last)

    def _first_before(self, attempt: int, step: int) -> Run | None:
        """The first later attempt that started before the step."""
        later = (run for run in self._runs if run.attempt > attempt and run.restored_step < step)
        return next(later, None)


def _pieces(outages: Sequence[Outage], now: float) -> list[Piece]:
    """The phases of each recovery one after the other, and what is left of it."""
    pieces: list[Piece] = []
    cursor = 0
    for outage in sorted(outages, key=lambda one: one.signalled_at):
        start = max(_us(outage.signalled_at), cursor)
        end = max(start, _us(outage.closed_at if outage.closed_at is not None else now))
        cursor = start
        for phase in PHASES:
            if phase == "total":
                continue
            upto = min(end, cursor + _us(outage.phases_s.get(phase) or 0.0))
            if upto > cursor:
                pieces.append((cursor, upto, f"{RECOVERY}{phase}", outage.incident))
            cursor = upto
        if end > cursor:
            pieces.append((cursor, end, Kind.RECOVERING.value, outage.incident))
        cursor = end
    return pieces


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
