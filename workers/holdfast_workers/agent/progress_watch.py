"""The node's watch over its ranks: reads their beacons, learns time limits, reports stalled ranks.

One thread reads every beacon four times a second or more often, and whenever a standstill reaches
its limit. A node does not judge whether a rank that makes no progress hangs or waits for another
rank: it sends one signal for each standstill that has passed its limit, and answers questions. A
rank that makes progress again may be reported again. The agent learns here, too, which window of
data its ranks read. An exception ends only that reading; a beacon that cannot be opened affects
only its own worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import structlog

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.background_threads import PeriodicThread
from holdfast_workers.agent.signal_sender import SignalSender
from holdfast_workers.progress.beacon import (
    IDLE,
    RING_ENTRIES,
    BeaconReader,
    BeaconReading,
    path_of,
    remove_all,
)
from holdfast_workers.progress.hang_limits import COLD_FLOORS, HangLimits, Standstill
from holdfast_workers.progress.inspection import sample
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.messages import (
    JOINING_PHASE,
    PREPARING_PHASE,
    Beat,
    Inspection,
    WorkerState,
)
from holdfast_workers.protocol.signals import RankStalled
from holdfast_workers.spec import DetectionSpec

LATE_PERIODS = 2
"""A reading that comes later than so many periods counts as so many periods: half of the shortest
limit, or less."""
SHORTEST_PAUSE_S = 0.01

_WATCHED_STATES = (WorkerState.JOINING, WorkerState.TRAINING)
_STOP_S = 5.0
_log = structlog.get_logger()


class _WatchedWorker:
    """One worker's beacon, from its first seat to its end."""

    def __init__(self, reader: BeaconReader, most_s: float) -> None:
        self.reader = reader
        self.standstill = Standstill(most_s)
        self.attempt = 0
        self.seated_ns = 0
        self.changed_ns = 0
        self.window: int | None = None
        self._phases = 0
        self._read_at = time.monotonic()

    def next_reading_in_s(self, limit_s: float, now: float) -> float:
        """Seconds until the standstill reaches its limit, if it lasts, but less than until the
        beacon's ring of ended phases overflows, at their present rate."""
        phases, since_s = self.reader.phases_read - self._phases, now - self._read_at
        self._phases, self._read_at = self.reader.phases_read, now
        ring_s = RING_ENTRIES / 2 * since_s / phases if phases else inf
        return min(ring_s, self.standstill.report_due_in_s(limit_s))

    def seat(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt, self.seated_ns = attempt, time.monotonic_ns()


class ProgressWatch:
    """Thread-safe. `workers` returns the node's workers, with rank and attempt. `on_window(window)`
    is called with the first window that ranks of the node read, and must not block."""

    def __init__(
        self,
        config: AgentConfig,
        workers: Callable[[], tuple[WorkerReport, ...]],
        signals: SignalSender,
        on_window: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._on_window = on_window
        self._folder = Path(config.memory_root)
        self._spec: DetectionSpec = config.plan.spec.detection
        self._workers = workers
        self._signals = signals
        self._limits = HangLimits(self._spec)
        self._lock = threading.Lock()
        self._watched: dict[str, _WatchedWorker] = {}
        shortest_s = min(self._spec.hang_floor_s, *self._spec.limits.values(), inf)
        self._period_s = min(config.watch_period_s, shortest_s / (2 * LATE_PERIODS))
        self._thread = PeriodicThread("beat-watch", self._period_s, self._report_stalled)
        remove_all(self._folder)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop(_STOP_S)

    def beats(self) -> tuple[Beat, ...]:
        """The present progress of every rank of this node."""
        with self._lock:
            return tuple(beat for beat, _ in self._read_beacons())

    def inspect(self, attempt: int) -> tuple[Inspection, ...]:
        """Inspect every rank of `attempt` on this node from outside, with its stack, within
        `inspect_timeout_s` altogether."""
        beats = [beat for beat in self.beats() if beat.attempt == attempt]
        return sample(beats, self._config.inspect_timeout_s)

    def _report_stalled(self) -> float:
        """Report every rank that has exceeded its limit since the last reading. Returns the seconds
        until the next reading."""
        with self._lock:
            beats = self._read_beacons()
            now = time.monotonic()
            stalled = [
                beat
                for beat, watched in beats
                if watched.standstill.observe(watched.changed_ns * 1e-9, beat.limit_s, now)
            ]
            due_in_s = min(
                (watched.next_reading_in_s(beat.limit_s, now) for beat, watched in beats),
                default=self._period_s,
            )
        for beat in stalled if self._spec.enabled else ():
            self._signals.send(
                RankStalled(beat), beat.attempt, beat.rank, beat.worker, pid=beat.pid
            )
        return max(SHORTEST_PAUSE_S, due_in_s)

    def _read_beacons(self) -> list[tuple[Beat, _WatchedWorker]]:
        """Read every beacon, and learn limits from the phases that ended since the last reading."""
        workers = {report.worker: report for report in self._workers()}
        for name in self._watched.keys() - workers.keys():
            del self._watched[name]
        beats = []
        for report in workers.values():
            if report.rank is None or report.state not in _WATCHED_STATES:
                continue
            watched = self._watched_of(report)
            if watched is None:
                continue
            for ended in watched.reader.ended_phases():
                self._limits.learn(ended.phase, ended.standstill_s, cold=ended.cold)
            beats.append((self._beat(report, report.rank, watched), watched))
        windows = [watched.window for _, watched in beats if watched.window is not None]
        if windows:
            self._on_window(min(windows))
        return beats

    def _watched_of(self, report: WorkerReport) -> _WatchedWorker | None:
        watched = self._watched.get(report.worker)
        if watched is None:
            try:
                reader = BeaconReader(path_of(self._folder, report.worker))
            except FileNotFoundError:  # the worker ended just now
                return None
            except OSError:  # only this beacon is lost: the others must still be read
                _log.exception("cannot open a beacon", worker=report.worker)
                return None
            most_s = LATE_PERIODS * self._period_s
            watched = self._watched[report.worker] = _WatchedWorker(reader, most_s)
        watched.seat(report.attempt)
        return watched

    def _before_its_begin(
        self, reading: BeaconReading | None, attempt: int, seated_ns: int
    ) -> BeaconReading:
        """The reading of a worker that has not begun `attempt`: it awaits its order, which takes
        no time, or still prepares for it, which may take long."""
        if reading is None or reading.phase != IDLE:
            return BeaconReading(0, PREPARING_PHASE, attempt, 0, 0, 0.0, True, seated_ns, ())
        since_ns = max(seated_ns, reading.changed_ns)
        limit_s = self._spec.limits.get(JOINING_PHASE, COLD_FLOORS * self._spec.hang_floor_s)
        return BeaconReading(0, JOINING_PHASE, attempt, 0, 0, limit_s, True, since_ns, ())

    def _beat(self, report: WorkerReport, rank: int, watched: _WatchedWorker) -> Beat:
        reading = watched.reader.read()
        if reading is None or reading.attempt != report.attempt:
            reading = self._before_its_begin(reading, report.attempt, watched.seated_ns)
        watched.changed_ns, watched.window = reading.changed_ns, reading.window
        limit_s = self._limits.limit_s(reading.phase, cold=reading.cold, bound_s=reading.bound_s)
        return Beat(
            rank=rank,
            worker=report.worker,
            pid=report.pid,
            attempt=reading.attempt,
            step=reading.step,
            phase=reading.phase,
            micro_batch=reading.micro_batch,
            age_s=max(0.0, (time.monotonic_ns() - reading.changed_ns) * 1e-9),
            limit_s=limit_s,
            groups=reading.groups,
            steps_timed=reading.steps_timed,
            computed_s=reading.computed_s,
        )
