"""The progress of the job: the line of history, the committed steps, and the skipped data windows;
and its end as far as it is known.

Invariants: a state that is off the line is never restored; a step counts as progress only beyond
`floor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from holdfast_service.job_model.events.progress import EndsEarlyEvent
from holdfast_service.job_model.supervisor_protocol import StopKind, StopOrder
from holdfast_service.placement.restore_points import AttemptBranch, HistoryLine
from holdfast_service.policy.causes import ErrorMark
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_workers.protocol.messages import Held
from holdfast_workers.training.skipped_windows import Ledger

GuardTrip = tuple[int, int, int, str]
"""(attempt, step, window, kind)"""


@dataclass
class Progress:
    """What the job has computed, and what of it is valid."""

    ledger: Ledger
    """Data windows that later attempts skip."""
    line: HistoryLine = field(default_factory=HistoryLine)
    committed: int = 0
    has_step: bool = False
    """Whether any step is known to be committed. A program may report none; another begins with
    step 0."""
    protected: int = -1
    """The newest step known to be in the memory of two nodes for every rank."""
    floor: int = 0
    """A step beyond this one is progress. It is the newest step of the present line, counted since
    the last attempt that restored a state off that line."""
    without_progress: int = 0
    """Consecutive attempts that ended without a step beyond `floor`."""
    no_data: tuple[float, int] | None = None
    """Since when attempts end for want of data, and the newest step at their ends: each comes as
    far, and no further."""
    mark: ErrorMark | None = None
    """The last error of the user's program, until an attempt has gone beyond its step."""
    marked_attempt: int = 0
    """The attempt that ended with `mark`; 0: one of a former supervisor."""
    is_past_mark: bool = False
    """Whether a later attempt has gone beyond the step of `mark`."""
    program_level: int = 0
    """The highest level at which a user's program has attached, in any attempt."""
    reports_steps: bool = False
    """Whether the user's program has reported a step, in any attempt: then it will in each."""
    reports_each: bool | None = None
    """Whether it reports each of its steps: only then the first one of an attempt tells where the
    program has gone on. One that prints every tenth does not; None: not seen yet."""
    last_report: tuple[int, int] = (0, 0)
    """(attempt, step) of the newest step that it has reported."""
    guard_trips: frozenset[GuardTrip] = frozenset()
    """Guard trips already recorded."""

    def newest_branch(self) -> AttemptBranch | None:
        return self.line.branches[-1] if self.line.branches else None

    def record_step(self, attempt: int, step: int) -> None:
        """Record that `attempt` committed `step`; ignored unless it formed the last world."""
        newest = self.newest_branch()
        if newest is None or attempt != newest.attempt:
            return
        if step > newest.restored_step and not newest.ran:
            self.record_run(attempt)
        self.committed, self.has_step = max(self.committed, step), True
        if step > self.floor:
            self.floor, self.without_progress = step, 0
        if self.mark is not None and attempt == self.marked_attempt:  # known late
            self.mark = replace(self.mark, reached=max(step, self.mark.reached or 0))
        elif self.mark is not None and step > self.mark.newest:
            self.is_past_mark = True

    def record_program_level(self, level: int) -> None:
        self.program_level = max(self.program_level, level)

    def record_first_report(self, attempt: int, step: int) -> None:
        """The user's program has reported the first `step` of an attempt."""
        self.reports_steps = True
        self.continue_from(attempt, step)

    def record_reported_steps(self, steps: Sequence[tuple[int, int]]) -> None:
        """Record (attempt, step) of steps that the user's program has reported, in their order."""
        for attempt, step in steps:
            before, self.last_report = self.last_report, max(self.last_report, (attempt, step))
            if attempt == before[0] and step > before[1]:
                is_next = step == before[1] + 1
                self.reports_each = is_next and self.reports_each is not False

    def record_late_step(self, step: int) -> None:
        """Record a step of the attempt before, which became known after its end."""
        self.committed, self.has_step = max(self.committed, step), True

    def record_held(self, held: Iterable[Held]) -> None:
        """Record that these states are in the memory of an agent: their steps were committed."""
        for state in held:
            self.record_step(state.attempt, state.step)

    def record_protected(self, step: int) -> None:
        self.protected = max(self.protected, step)

    def record_run(self, attempt: int) -> None:
        """The steps of `attempt` belong to history from now on."""
        self.line = self.line.with_run(attempt)

    def start_attempt(self, attempt: int, restored_step: int) -> None:
        """`attempt` was formed to start from `restored_step`."""
        if self.is_past_mark:  # after progress, the same error counts as a new error
            self.mark, self.is_past_mark = None, False
        if self.line.starts_elsewhere(restored_step):
            self.floor = restored_step
        self.add_branch(attempt, restored_step)

    def add_branch(self, attempt: int, restored_step: int) -> None:
        """Add an attempt to the line: one that forms, or one that a former supervisor formed."""
        self.line = self.line.with_attempt(attempt, restored_step)

    def continue_from(self, attempt: int, step: int) -> None:
        """`attempt` runs from `step`, which may be older than the newest step of the last one."""
        self.committed = step
        self.record_step(attempt, step)

    def roll_back(self, attempt: int, step: int) -> None:
        """Discard the steps after `step` of this and of earlier attempts."""
        self.line = self.line.with_rollback(attempt, step)

    def limit_protected(self, step: int) -> None:
        """Protect no state after `step`: none of them is usable."""
        self.protected = min(self.protected, step)

    def count_lack_of_progress(self) -> None:
        self.without_progress += 1

    def record_want_of_data(self, now: float) -> None:
        """An attempt ended only because the job's data did not come. If it came as far as the one
        before, the outage goes on, also if it has computed steps again."""
        if self.no_data is None or self.no_data[1] != self.committed:
            self.no_data = (now, self.committed)

    def count_as_progress(self) -> None:
        """An attempt got on, though it reported no step."""
        self.without_progress, self.mark, self.no_data = 0, None, None

    def remember_error(self, mark: ErrorMark, attempt: int) -> None:
        """`attempt` ended with this error."""
        self.mark, self.marked_attempt, self.is_past_mark = mark, attempt, False

    def record_guard_trip(self, trip: GuardTrip) -> bool:
        """Record a guard trip. False if it is known, or if a later attempt has formed."""
        newest = self.newest_branch()
        if newest is None or trip[0] != newest.attempt or trip in self.guard_trips:
            return False
        self.guard_trips |= {trip}
        return True

    def skip_window(self, window: tuple[int, int]) -> None:
        """Later attempts skip this half-open data window."""
        self.ledger |= Ledger.of([window])

    def restore(self, facts: Facts) -> None:
        """Restore the progress from the journal."""
        self.line, self.committed, self.has_step = facts.line, facts.committed, facts.has_step
        self.floor, self.without_progress = facts.floor, facts.without_progress
        outages = facts.incident.data_outages if facts.incident is not None else ()
        self.no_data = (min(outages), facts.committed) if outages else None
        self.mark = facts.mark
        self.program_level, self.reports_steps = facts.program_level, facts.reports_steps
        self.ledger |= facts.ledger


@dataclass
class Ending:
    """A requested cancel or pause, and the last step of the ranks."""

    steps: int
    """Number of steps of the job."""
    stop: StopOrder | None = None
    """The requested cancel or pause."""
    final_step: int | None = None
    """The last step, set when the first rank reports that it is done."""
    early: EndsEarlyEvent | None = None
    """The step before the last one after which the ranks ended training by themselves."""
    giving_back: tuple[int, int] | None = None
    """(attempt, step) that is saved before the job is given back to the queue."""
    why_giving_back: str = ""

    @property
    def end_step(self) -> int:
        """The step after which the job is complete."""
        return self.steps if self.early is None else self.early.step

    @property
    def last_step(self) -> int:
        return self.end_step if self.final_step is None else self.final_step

    def request(self, wanted: StopOrder) -> StopOrder | None:
        """Record a request: a repeated one can only bring the deadline forward, and a cancel wins
        over a pause. Returns the order if it is new or has changed."""
        before = self.stop
        if before is not None:
            if before.kind is StopKind.CANCEL:
                wanted = replace(wanted, kind=before.kind, reason=before.reason)
            wanted = replace(wanted, deadline=min(before.deadline, wanted.deadline))
        self.stop = wanted
        return wanted if wanted != before else None

    def undo(self) -> None:
        """The job continues: no stop is requested."""
        self.stop = None

    def give_back(self, key: tuple[int, int], why: str) -> None:
        """The job is given back to the queue once this (attempt, step) is saved."""
        self.giving_back, self.why_giving_back = key, why

    def keep(self) -> None:
        """A world could be formed after all."""
        self.giving_back = None

    def record_final_step(self, step: int) -> None:
        """Not every rank of a program knows its last step."""
        self.final_step = max(step, self.final_step or 0)

    def end_early(self, event: EndsEarlyEvent) -> bool:
        """The ranks end training after this step. False if that was known."""
        is_news = self.early != event
        self.early = event
        return is_news

    def begin_after(self, step: int) -> None:
        """An attempt begins with the state after `step`: an early end after it is decided anew."""
        if self.early is not None and step < self.early.step:
            self.early = self.final_step = None

    def continue_training(self) -> None:
        """The ranks take further steps after all."""
        self.final_step = None

    def restore(self, facts: Facts) -> None:
        """Restore a requested stop, and an early end, from the journal."""
        self.stop, self.early = facts.stop, facts.early
