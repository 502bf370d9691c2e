"""The progress of the job: the line of history, the committed steps, and the skipped data windows;
and its end as far as it is known.

Invariants: a state that is off the line is never restored; a step counts as progress only beyond
`floor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

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
    mark: ErrorMark | None = None
    """The last error of the user's program, until a step beyond it is committed."""
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
        if self.mark is not None and step > self.mark.step:
            self.mark = None  # after progress, the same error counts as a new error

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

    def count_as_progress(self) -> None:
        """An attempt got on, though it reported no step."""
        self.without_progress, self.mark = 0, None

    def remember_error(self, mark: ErrorMark) -> None:
        self.mark = mark

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
        self.mark = facts.mark
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

    giving_back: tuple[int, int] | None = None
    """(attempt, step) that is saved before the job is given back to the queue."""
    why_giving_back: str = ""

    @property
    def last_step(self) -> int:
        return self.steps if self.final_step is None else self.final_step

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
        self.final_step = step

    def continue_training(self) -> None:
        """The ranks take further steps after all."""
        self.final_step = None

    def restore(self, stop: StopOrder | None) -> None:
        """Restore a requested stop from the journal."""
        self.stop = stop
