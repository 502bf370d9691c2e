"""Goodput: assigns every moment in which a job held resources to exactly one kind of time. Pure.

Promises: the kinds sum to the time held, to the microsecond; a step counts as productive once, in
the attempt whose computation is part of history; all lost time is attributed to one incident, or
to none; time off the cluster (queued, paused, absent) is not a loss and is not counted. Each moment
also counts as device-seconds, at the world size of that moment. All follows from stored data: rows
of steps, attempts, incidents, absences. Time that no stored step covers is never productive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from holdfast_service.job_model.world_history import (
    Absence,
    DeviceClock,
    PresenceClock,
    WorldPeriod,
)
from holdfast_service.policy.incidents import PHASES


class TimeKind(StrEnum):
    """The kinds of time in a job. The phases of a recovery are `recovery.<phase>`."""

    PRODUCTIVE = "productive"  # in a step that is part of history
    BETWEEN_STEPS = "between_steps"  # between two steps of one attempt: saving, an evaluation
    NO_STEP = "no_step"  # the ranks run, and no step of this time is known, or not yet
    REPLAYED = "replayed"  # in a step that was lost and had to be computed again
    STARTING = "starting"  # on the cluster, before the first step
    DETECTION = "detection"  # from the last finished step to the first signal of a fault
    RECOVERING = "recovery.other"  # from the signal to the next first step, outside of its phases
    FINISHING = "finishing"  # after the last step, until the end: its checkpoint


RECOVERY = "recovery."


def is_lost(kind: str) -> bool:
    """Whether time of this kind counts as lost to a fault."""
    return kind in (TimeKind.REPLAYED, TimeKind.DETECTION) or kind.startswith(RECOVERY)


SETTLED_AFTER_S = 60.0
SETTLED_AFTER_STARTS = 10.0


def is_settled(goodput: Any, productive_s: Any, starting_s: Any) -> Any:
    """Whether a goodput says how a job trains, and not only that it has just started: its time on
    the cluster is more than ten times that of its starts, and a minute. Then the starts alone leave
    90% at least. For numbers, and for columns of them; false for a job without steps."""
    # The time on the cluster is productive_s / goodput.
    return productive_s > goodput * (SETTLED_AFTER_S + SETTLED_AFTER_STARTS * starting_s)


@dataclass(frozen=True)
class CommittedStep:
    """A step that was committed. `at`: when it ended."""

    attempt: int
    step: int
    at: float
    step_time_s: float


@dataclass(frozen=True)
class StepRange:
    """The sums over consecutive steps of one attempt. `since`: start of the first step; `at`: end
    of the last step; `busy_s`: time within steps."""

    attempt: int
    first: int
    last: int
    since: float
    at: float
    busy_s: float
    steps: int


@dataclass(frozen=True)
class TimeSpan:
    """Time of one kind; consecutive steps and the time between them form one span."""

    kind: str
    since: float
    until: float
    incident: int | None


@dataclass(frozen=True)
class AttemptRun:
    """An attempt that computed steps, and the step that it started from."""

    attempt: int
    restored_step: int
    incident: int | None = None
    """Number of the incident that made the attempt necessary, if any."""
    running_at: float | None = None
    """When its ranks ran; of a program whether or not it reports steps. None: not known."""


@dataclass(frozen=True)
class Outage:
    """An incident that ended attempts, from first signal to the next attempt's first step."""

    signalled_at: float
    closed_at: float | None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    incident: int | None = None
    """The incident's number."""


@dataclass(frozen=True)
class Goodput:
    """Seconds and device-seconds by kind of time. They sum to `held_s` and `held_device_s`."""

    held_s: float
    by_kind_s: Mapping[str, float]
    held_device_s: float
    by_kind_device_s: Mapping[str, float]
    steps: int
    """Steps that are part of history."""
    steps_replayed: int
    lost_device_s: Mapping[int | None, float] = field(default_factory=dict)
    """Incident -> device-seconds lost to it. None: lost without an incident, as when a job starts
    again because everything it had on the cluster is gone. They sum to the lost kinds of time."""
    devices: int = 1
    """The number of devices at the end."""
    spans: tuple[TimeSpan, ...] = ()
    """The job's time in chronological order."""
    absences: tuple[Absence, ...] = ()
    """The times within a stay on the cluster that are not counted."""

    @property
    def goodput(self) -> float | None:
        """Device-seconds in steps that are part of history, over those held; None while that is
        zero. For a job of one size this is the ratio of the times."""
        return self._share(TimeKind.PRODUCTIVE)

    @property
    def effective_training_time_ratio(self) -> float | None:
        """Device-seconds in steps that are part of history and between them, over those held."""
        return self._share(TimeKind.PRODUCTIVE, TimeKind.BETWEEN_STEPS)

    def _share(self, *kinds: TimeKind) -> float | None:
        if not self.held_device_s:
            return None
        return sum(self.by_kind_device_s[kind] for kind in kinds) / self.held_device_s


def account(
    held: Sequence[tuple[float, float]],
    rows: Iterable[CommittedStep | StepRange],
    runs: Sequence[AttemptRun],
    outages: Sequence[Outage],
    *,
    ended: bool,
    worlds: Sequence[WorldPeriod] = (),
    devices: int = 1,
    absences: Sequence[Absence] = (),
    is_program: bool = False,
) -> Goodput:
    """The goodput of a job.

    `held`: the stays on the cluster, in order; a live job's last one ends with its last known
    moment. `absences`: within them; a step range must not reach over one. `worlds`: see
    `world_periods`; `devices`: their number in moments without a world, as before the first
    attempt. A step range must be part of history as a whole, or be discarded as a whole by one
    attempt: see `History.has_one_fate`. `is_program`: it may have made steps before the first one
    that it reports.
    """
    presence = PresenceClock(absences)
    outages = [*outages, *_restarts(absences, runs)]
    if absences:
        at = presence.at
        held = [(at(since), at(until)) for since, until in held]
        rows = [replace(row, since=at(row.since), at=at(row.at)) for row in map(_as_range, rows)]
        outages = [
            replace(
                outage,
                signalled_at=at(outage.signalled_at),
                closed_at=None if outage.closed_at is None else at(outage.closed_at),
            )
            for outage in outages
        ]
        worlds = [replace(world, since=at(world.since), until=at(world.until)) for world in worlds]
    history = History(runs, is_program=is_program)
    running = sorted(_us(presence.at(run.running_at)) for run in runs if run.running_at is not None)
    ordered = sorted(
        (_as_range(row) for row in rows), key=lambda steps: (steps.at, steps.attempt, steps.first)
    )
    clock = DeviceClock(worlds, devices)
    ledger = _TimeLedger(_recovery_pieces(outages, held[-1][1] if held else 0.0), clock, running)
    place = 0
    for number, (since, until) in enumerate(held):
        begin = place
        while place < len(ordered) and (ordered[place].at <= until or number == len(held) - 1):
            place += 1
        over = ended or number < len(held) - 1
        ledger.add_interval(_us(since), _us(until), ordered[begin:place], history, over=over)
    return Goodput(
        held_s=sum(ledger.spent.values()) / 1e6,
        by_kind_s={kind: us / 1e6 for kind, us in ledger.spent.items()},
        held_device_s=sum(ledger.spent_by_devices.values()) / 1e6,
        by_kind_device_s={kind: us / 1e6 for kind, us in ledger.spent_by_devices.items()},
        steps=ledger.steps,
        steps_replayed=ledger.replayed,
        lost_device_s={incident: us / 1e6 for incident, us in ledger.lost_by_devices.items()},
        devices=clock.size_before(_us(held[-1][1])) if held else devices,
        spans=tuple(
            TimeSpan(kind, *stretch, incident)
            for kind, since, until, incident in ledger.spans
            for stretch in presence.stretches(since / 1e6, until / 1e6)
        ),
        absences=tuple(absences),
    )


def _restarts(absences: Sequence[Absence], runs: Sequence[AttemptRun]) -> list[Outage]:
    """Starts of a job of which everything had gone: lost time, without an incident."""
    running = sorted(run.running_at for run in runs if run.running_at is not None)
    return [
        Outage(absence.until, next((at for at in running if at >= absence.until), None))
        for absence in absences
        if absence.gone
    ]


def _as_range(row: CommittedStep | StepRange) -> StepRange:
    if isinstance(row, StepRange):
        return row
    since = row.at - row.step_time_s
    return StepRange(row.attempt, row.step, row.step, since, row.at, row.step_time_s, 1)


RecoveryPiece = tuple[int, int, str, int | None]
"""Start, end, kind of time, incident; times in microseconds."""


class _TimeLedger:
    """Assigns each microsecond to one kind. `pieces`: of recoveries, in order, not overlapping.
    `running`: when attempts ran, in order."""

    def __init__(
        self, pieces: Sequence[RecoveryPiece], clock: DeviceClock, running: Sequence[int]
    ) -> None:
        self._recovery_pieces = pieces
        self._clock = clock
        self._running = running
        self._runs_from: int | None = None
        """When the first attempt of the interval ran."""
        self._next = 0
        self.spent: dict[str, int] = {kind.value: 0 for kind in TimeKind}
        self.spent_by_devices = dict(self.spent)
        self.lost_by_devices: dict[int | None, int] = {}
        self.steps = 0
        self.replayed = 0
        self.spans: list[tuple[str, int, int, int | None]] = []
        self._at = 0

    def add_interval(
        self, since: int, until: int, rows: Sequence[StepRange], history: History, *, over: bool
    ) -> None:
        """Add an interval with resources, and the steps that ended in it."""
        cursor, before, last = since, None, 0
        self._at = since
        self._runs_from = next((at for at in self._running if at >= since), None)
        for row in rows:
            end = min(max(_us(row.at), cursor), until)
            start = max(end - (_us(row.at) - _us(row.since)), cursor)
            idle = max(0, (_us(row.at) - _us(row.since)) - _us(row.busy_s))
            idle = min(idle, end - start) if row.steps > 1 else 0
            if before == row.attempt:
                none_is_missing = row.first <= last + 1
                between = TimeKind.BETWEEN_STEPS if none_is_missing else TimeKind.NO_STEP
                self._assign(between, start - cursor)
            else:
                is_first = before is None  # what comes before it is known without it
                after = TimeKind.STARTING if is_first else TimeKind.RECOVERING
                none_is_missing = history.begins_with(row.attempt, row.first)
                ready = TimeKind.BETWEEN_STEPS if none_is_missing else TimeKind.NO_STEP
                self._gap(cursor, start, after if is_first else TimeKind.DETECTION, after, ready)
            complete = row.steps == row.last - row.first + 1
            self._assign(TimeKind.BETWEEN_STEPS if complete else TimeKind.NO_STEP, idle)
            if history.keeps(row.attempt, row.last):
                self._assign(TimeKind.PRODUCTIVE, end - start - idle)
                self.steps += row.steps
            else:
                discarded_by = history.discarded_by(row.attempt, row.last)
                self._assign(TimeKind.REPLAYED, end - start - idle, discarded_by)
                self.replayed += row.steps
            cursor, before, last = end, row.attempt, row.last
        if before is None:
            self._gap(cursor, until, TimeKind.STARTING, TimeKind.STARTING, TimeKind.STARTING)
        else:
            rest = TimeKind.FINISHING if over else TimeKind.NO_STEP
            self._gap(cursor, until, rest, rest, rest)

    def _gap(
        self, since: int, until: int, before: TimeKind, after: TimeKind, ready: TimeKind
    ) -> None:
        """Assign time without steps: to the recoveries within it, to kind `before` ahead of the
        first recovery, to kind `after` between them, and to kind `ready` behind the last one: its
        attempt has trained from then on, and evaluated its first step. Time lost ahead of the first
        recovery is attributed to that recovery's incident."""
        cursor, kind, incident = since, before, None
        while (
            self._next < len(self._recovery_pieces)
            and self._recovery_pieces[self._next][1] <= cursor
        ):
            self._next += 1
        at = self._next
        while at < len(self._recovery_pieces) and self._recovery_pieces[at][0] < until:
            start, end, phase, of = self._recovery_pieces[at]
            start, end = max(start, cursor), min(end, until)
            if at == self._next:
                incident = of
                if start > cursor and kind is not TimeKind.STARTING:
                    kind = TimeKind.DETECTION
            self._assign_wait(kind, start - cursor, incident)
            self._assign(phase, end - start, of)
            cursor, kind, incident, at = max(end, cursor), after, of, at + 1
        kind = kind if at == self._next else ready
        self._assign_wait(kind, until - cursor, incident)

    def _assign_wait(self, kind: TimeKind, microseconds: int, incident: int | None) -> None:
        """Assign time without steps. A start is over once the ranks of an attempt run."""
        if kind is TimeKind.STARTING and self._runs_from is not None:
            starting = min(max(0, self._runs_from - self._at), max(0, microseconds))
            self._assign(kind, starting)
            kind, microseconds = TimeKind.NO_STEP, microseconds - starting
        self._assign(kind, microseconds, incident)

    def _assign(self, kind: str, microseconds: int, incident: int | None = None) -> None:
        """`incident`: the time is attributed to it, if its kind is lost."""
        if microseconds <= 0:
            return
        by_devices = self._clock.between(self._at, self._at + microseconds)
        for sums, amount in ((self.spent, microseconds), (self.spent_by_devices, by_devices)):
            sums[str(kind)] = sums.get(str(kind), 0) + amount
        if is_lost(kind):
            self.lost_by_devices[incident] = self.lost_by_devices.get(incident, 0) + by_devices
        self._append_span(str(kind), microseconds, incident)

    def _append_span(self, kind: str, microseconds: int, incident: int | None) -> None:
        """Keeps the spans in order. Time between two steps joins the span of those steps."""
        since, self._at = self._at, self._at + microseconds
        last = self.spans[-1] if self.spans else None
        together = last is not None and last[2] == since
        if together and last is not None:
            same = last[0] == kind and last[3] == incident
            if same or (kind == TimeKind.BETWEEN_STEPS and last[0] in _IN_STEPS):
                self.spans[-1] = (last[0], last[1], self._at, last[3])
                return
            if last[0] == TimeKind.BETWEEN_STEPS and kind in _IN_STEPS:
                self.spans[-1] = (kind, last[1], self._at, incident)
                return
        self.spans.append((kind, since, self._at, incident))


_IN_STEPS = (TimeKind.PRODUCTIVE, TimeKind.REPLAYED)


class History:
    """Decides which steps are part of history, and which incident discarded the others."""

    def __init__(self, runs: Sequence[AttemptRun], *, is_program: bool = False) -> None:
        self._is_program = is_program
        self._runs = sorted(runs, key=lambda run: run.attempt)
        self._begins = {run.attempt: run.restored_step + 1 for run in self._runs}
        self._floors: dict[int, int] = {}
        lowest: int | None = None
        for run in reversed(self._runs):
            if lowest is not None:
                self._floors[run.attempt] = lowest
            lowest = run.restored_step if lowest is None else min(lowest, run.restored_step)

    def keeps(self, attempt: int, step: int) -> bool:
        """Whether the step is part of history: no later attempt started before it."""
        return step <= self._floors.get(attempt, step)

    def discarded_by(self, attempt: int, step: int) -> int | None:
        """The incident of the first later attempt that started before a discarded step."""
        run = self._first_before(attempt, step)
        return run.incident if run is not None else None

    def begins_with(self, attempt: int, first: int) -> bool:
        """Whether `first` is known to be the first step that the attempt computed."""
        return not self._is_program and first <= self._begins.get(attempt, first)

    def has_one_fate(self, attempt: int, first: int, last: int) -> bool:
        """Whether all steps from `first` to `last` of an attempt were kept, or were discarded by
        the same later attempt."""
        return self._first_before(attempt, first) == self._first_before(attempt, last)

    def _first_before(self, attempt: int, step: int) -> AttemptRun | None:
        """The first later attempt that started before the step, if any."""
        later = (run for run in self._runs if run.attempt > attempt and run.restored_step < step)
        return next(later, None)


def _recovery_pieces(outages: Sequence[Outage], now: float) -> list[RecoveryPiece]:
    """The phases of each recovery one after the other, then the rest of that recovery."""
    pieces: list[RecoveryPiece] = []
    cursor = 0
    for outage in sorted(outages, key=lambda outage: outage.signalled_at):
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
            pieces.append((cursor, end, TimeKind.RECOVERING.value, outage.incident))
        cursor = end
    return pieces


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
