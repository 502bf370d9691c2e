"""The end of the job as far as it is known: a requested stop, and the last step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_service.job_model.supervisor_protocol import StopKind, StopOrder


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
