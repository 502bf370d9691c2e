"""What the agents' beats say of a job's ranks: their last progress, and how long a step takes them.

Soft state. The last progress is for display only: the agents detect stalled ranks, and sooner.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from holdfast_workers.protocol.messages import Beat, StepRow


class ProgressRecord:
    """The last reported progress of a job's ranks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[str, tuple[float, tuple[Beat, ...]]] = {}
        """Seat -> (monotonic time of the report, beats)."""

    def add(self, seat: str, beats: tuple[Beat, ...]) -> None:
        """Replace the beats of all ranks of the agent in this seat."""
        with self._lock:
            self._reported[seat] = (time.monotonic(), beats)

    def for_attempt(self, attempt: int) -> tuple[Beat, ...]:
        """The beats of this attempt in rank order, with their present age.

        If two agents reported the same rank, the later report counts.
        """
        now = time.monotonic()
        with self._lock:
            reported = sorted(self._reported.values(), key=lambda report: report[0])
        found = {
            beat.rank: replace(beat, age_s=beat.age_s + now - at)
            for at, beats in reported
            for beat in beats
            if beat.attempt == attempt
        }
        return tuple(found[rank] for rank in sorted(found))


class ProgramRankTimes:
    """How long each rank of a user's program computes for a step, from one poll to the next. Pure.

    A recipe's ranks tell each other their times in every step. A program's ranks do not: each shows
    in its beacon how many steps it has made and how long it has computed for them. The newest
    totals of all ranks are compared with those of the comparison before.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._since: dict[int, Beat] = {}
        self._newest: dict[int, Beat] = {}
        self._compared_at = 0.0

    def add(self, beats: Iterable[Beat], ranks: int, now: float) -> StepRow | None:
        """Take the beats of one agent. A row with `compute_s` alone once each of `ranks` ranks of
        the attempt has made a further step; `now` in seconds, of any clock."""
        for beat in beats:
            if beat.steps_timed and beat.attempt >= self._attempt:
                self._take(beat, now)
        everyone = range(ranks)
        if (
            not ranks
            or self._newest.keys() != set(everyone)
            or not all(map(self._has_stepped, everyone))
        ):
            return None
        compute_s = tuple(self._per_step(rank) for rank in everyone)
        step = min(beat.steps_timed for beat in self._newest.values())
        took_s, self._compared_at = now - self._compared_at, now
        self._since = dict(self._newest)
        return _row(self._attempt, step, took_s, compute_s)

    def _take(self, beat: Beat, now: float) -> None:
        if beat.attempt > self._attempt:
            self._attempt, self._compared_at = beat.attempt, now
            self._since, self._newest = {}, {}
        self._since.setdefault(beat.rank, beat)
        self._newest[beat.rank] = beat

    def _has_stepped(self, rank: int) -> bool:
        return self._newest[rank].steps_timed > self._since[rank].steps_timed

    def _per_step(self, rank: int) -> float:
        then, now = self._since[rank], self._newest[rank]
        return (now.computed_s - then.computed_s) / (now.steps_timed - then.steps_timed)


def _row(attempt: int, step: int, took_s: float, compute_s: tuple[float, ...]) -> StepRow:
    return StepRow(
        attempt=attempt,
        step=step,
        at=0.0,
        loss=math.nan,
        grad_norm=math.nan,
        lr=math.nan,
        tokens=0,
        step_time_s=took_s,
        samples="",
        compute_s=compute_s,
    )
