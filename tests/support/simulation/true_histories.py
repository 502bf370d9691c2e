"""True histories of a job, with their own books, and the reports of them that a server gets.

The books note what every device did in every moment. The reports are those of a supervisor: rows,
events and attempts. A server that is away gets them later; if everything of the job goes meanwhile,
they are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.supervisor_protocol import Phase, SupervisorEvent, SupervisorReport
from holdfast_workers.protocol.messages import StepRow

STEP, PAUSE_OF_STEPS, OTHER = "step", "between steps", "other"
START_S = 4.0


@dataclass(frozen=True)
class Moment:
    """What `devices` devices did from `since` until `until`."""

    since: float
    until: float
    devices: int
    did: str
    attempt: int = 0
    step: int = 0

    @property
    def device_s(self) -> float:
        return (self.until - self.since) * self.devices


@dataclass
class TrueHistory:
    """`reports_steps`: a recipe, or a program of level 1; otherwise no step is ever known."""

    now: float
    reports_steps: bool
    is_program: bool
    devices: int = 4
    books: list[Moment] = field(default_factory=list)
    discarded: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, step) that a later attempt computed again."""
    attempt: int = 0
    step: int = 0
    incidents: int = 0
    phase: Phase = Phase.STARTING
    rows: list[StepRow] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)
    _seq: int = 0
    _is_first: bool = True

    # --- what happens ---------------------------------------------------------------------------

    def start(self, restored: int, incident: int | None = None, devices: int | None = None) -> None:
        """An attempt forms, and its ranks join."""
        self._spend(START_S / 4, OTHER)
        self.devices = devices or self.devices
        self.attempt += 1
        self.step, self._is_first = restored, True
        mesh = {"dp_shard": self.devices}
        self._emit(
            EventKind.ATTEMPT_FORMING,
            attempt=self.attempt,
            mesh=mesh,
            world_size=self.devices,
            members=[],
            standbys=[],
            restore={"step": restored, "tiers": {}, "sources": {}},
            cause_incident=incident,
        )
        self._spend(START_S, OTHER)
        if self.is_program:
            self._run()

    def train(self, steps: int, step_s: float, gap_s: float) -> Iterator[None]:
        """Steps, each after some time between steps; yields after each."""
        for _ in range(steps):
            if not self._is_first or not self.is_program:
                self._spend(gap_s, PAUSE_OF_STEPS)
            self.step += 1
            self._spend(step_s, STEP)
            if self.reports_steps:
                self._report_row(step_s)
            yield

    def stop(self, seconds: float, step_s: float) -> None:
        """All processes stand still in the middle of a step: its clock goes on."""
        self.step += 1
        self._spend(step_s / 2, STEP)
        self.now += seconds
        self._emit(EventKind.JOB_AWAY, away_s=seconds, why="stopped")
        self._spend(step_s / 2, STEP)
        if self.reports_steps:
            self._report_row(step_s + seconds)

    def stay_quiet(self, seconds: float) -> None:
        """The ranks run, and report no step, as in an evaluation."""
        self._spend(seconds, OTHER if self._is_first else PAUSE_OF_STEPS)

    def fail(self, detect_s: float, back: int, devices: int, evaluation_s: float = 0.0) -> None:
        """A fault is seen after `detect_s`; the next attempt starts `back` steps earlier. Its first
        step, if it is a recipe's, is evaluated before it is reported."""
        self._spend(detect_s, OTHER)
        self.incidents += 1
        incident, signalled_at = self.incidents, self.now
        course: dict[str, Any] = {
            "incident": incident,
            "cause": "worker_crash",
            "failures": [signalled_at],
            "signalled_at": signalled_at,
            "opened_at": signalled_at,
            "level": int(self.reports_steps) if self.is_program else 3,
        }
        self._emit(EventKind.INCIDENT_OPENED, **course)
        self.phase = Phase.RECOVERING
        self._spend(0.5, OTHER)
        self.start(max(0, self.step - back) if self.reports_steps else 0, incident, devices)
        phases_s = {"fence": 0.5, "form": START_S}
        closed_at = self.now
        if not self.is_program:
            self.step += 1
            self._spend(1.0, STEP)
            closed_at = self.now
            self._spend(evaluation_s, PAUSE_OF_STEPS)
            self._report_row(1.0)
        course |= {"next_attempt": self.attempt, "closed_at": closed_at, "phases_s": phases_s}
        self._emit(EventKind.INCIDENT_CLOSED, **course)

    def go(self, seconds: float) -> None:
        """Everything of the job goes, with all that no server has stored; it is back later."""
        self.rows, self.events = [], []
        self.now += seconds

    def end(self) -> None:
        self._spend(1.0, OTHER)
        self.phase = Phase.ENDED
        self._emit(
            EventKind.ENDED, outcome="SUCCEEDED", code="succeeded", message="", step=self.step
        )

    def report(self) -> SupervisorReport:
        """All that is not stored yet."""
        rows, self.rows = tuple(self.rows), []
        events, self.events = tuple(self.events), []
        step = self.step if self.reports_steps else 0
        return SupervisorReport(1, self.phase, step, self.attempt, events=events, rows=rows)

    # --- the books ------------------------------------------------------------------------------

    def device_s(self, *did: str, kept: bool = False) -> float:
        """Device-seconds of these activities, or of all. `kept`: of steps, those that are part of
        history."""
        return sum(
            moment.device_s
            for moment in self.books
            if moment.did in (did or (moment.did,))
            and not (kept and (moment.attempt, moment.step) in self.discarded)
        )

    def _spend(self, seconds: float, did: str) -> None:
        if seconds > 0:
            key = (self.attempt, self.step) if did == STEP else (0, 0)
            self.books.append(Moment(self.now, self.now + seconds, self.devices, did, *key))
            self.now += seconds

    def _drop_steps_after(self, restored: int) -> None:
        self.discarded |= {
            (moment.attempt, moment.step)
            for moment in self.books
            if moment.did == STEP and moment.step > restored and moment.attempt < self.attempt
        }

    # --- the reports ----------------------------------------------------------------------------

    def _report_row(self, step_s: float) -> None:
        if self._is_first and not self.is_program:
            self._run()
        self._is_first = False
        self.rows.append(
            StepRow(
                attempt=self.attempt,
                step=self.step,
                at=self.now,
                loss=1.0,
                grad_norm=1.0,
                lr=1.0,
                tokens=1,
                step_time_s=step_s,
                samples="",
            )
        )

    def _run(self) -> None:
        """The ranks run: from here on the steps after the restored one are not part of history."""
        self.phase = Phase.RUNNING
        restored = self.step if self.is_program else self.step - 1
        self._drop_steps_after(restored)
        first = None if self.is_program else self.step
        members: list[Any] = []
        self._emit(
            EventKind.ATTEMPT_RUNNING,
            attempt=self.attempt,
            members=members,
            joined={},
            first_step=first,
        )

    def _emit(self, kind: EventKind, **data: Any) -> None:
        self._seq += 1
        self.events.append(SupervisorEvent(self._seq, self.now, kind, data))
