"""The node's watch over its ranks: reads their beacons, learns limits, tells who stands still.

One thread looks at every beacon several times a second. What a rank does while it stands, whether
it hangs or waits for another, is not for a node to judge: it sends one signal for each standstill
that has passed its limit, and answers questions. A rank that goes on may be told of again. What
fails in a turn is printed and costs that turn; a beacon that cannot be opened, its own worker's.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from holdfast_workers.agent.agent_config import AgentConfig
from holdfast_workers.agent.periodic_thread import Turns
from holdfast_workers.agent.signal_sender import Teller
from holdfast_workers.progress.beacon import BeaconReader, Reading, path_of, remove_all
from holdfast_workers.progress.hang_limits import Limits, Standstill
from holdfast_workers.progress.inspection import sample
from holdfast_workers.protocol.messages import (
    Beat,
    Inspection,
    SignalKind,
    WorkerReport,
    WorkerState,
)
from holdfast_workers.spec import DetectionSpec, TrainingSpec

JOINING = "joining"
"""What a beat says of a rank that has not begun to take up its order."""

HELD_UP_TURNS = 10
"""A turn of the watch that comes later than so many turns counts as that many."""

_WATCHED_STATES = (WorkerState.JOINING, WorkerState.TRAINING)
_STOP_S = 5.0


class _Watched:
    """One worker's beacon, from its first seat to its end."""

    def __init__(self, reader: BeaconReader, most_s: float) -> None:
        self.reader = reader
        self.standstill = Standstill(most_s)
        self.attempt = 0
        self.seated_ns = 0
        self.changed_ns = 0

    def seat(self, attempt: int) -> None:
        if attempt != self.attempt:
            self.attempt, self.seated_ns = attempt, time.monotonic_ns()


class BeatWatch:
    """Thread-safe. `workers` says who is there, with rank and attempt."""

    def __init__(
        self, config: AgentConfig, workers: Callable[[], tuple[WorkerReport, ...]], teller: Teller
    ) -> None:
        self._config = config
        self._folder = Path(config.memory_root)
        self._spec: DetectionSpec = TrainingSpec.model_validate(config.training).detection
        self._workers = workers
        self._teller = teller
        self._limits = Limits(self._spec)
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._turns = Turns("beat-watch", config.watch_period_s, self._turn)
        remove_all(self._folder)

    def start(self) -> None:
        self._turns.start()

    def stop(self) -> None:
        self._turns.stop(_STOP_S)

    def beats(self) -> tuple[Beat, ...]:
        """How far every rank here has come, now."""
        with self._lock:
            return tuple(beat for beat, _ in self._look())

    def inspect(self, attempt: int) -> tuple[Inspection, ...]:
        """Every rank here of `attempt` from outside, with its stack; all within a deadline."""
        beats = [beat for beat in self.beats() if beat.attempt == attempt]
        return sample(beats, self._config.inspect_timeout_s)

    def _turn(self) -> None:
        """Tell of every rank that has stood still for too long since the last turn."""
        now = time.monotonic()
        with self._lock:
            stalled = [
                beat
                for beat, watched in self._look()
                if watched.standstill.look(watched.changed_ns, beat.limit_s, now)
            ]
        for beat in stalled if self._spec.enabled else ():
            self._teller.tell(
                SignalKind.RANK_STALLED,
                beat.attempt,
                beat.rank,
                beat.worker,
                pid=beat.pid,
                detail={"beat": asdict(beat)},
            )

    def _look(self) -> list[tuple[Beat, _Watched]]:
        """Read every beacon, and learn from what has ended since the last time."""
        workers = {report.worker: report for report in self._workers()}
        for name in self._watched.keys() - workers.keys():
            del self._watched[name]
        found = []
        for report in workers.values():
            if report.rank is None or report.state not in _WATCHED_STATES:
                continue
            watched = self._watched_of(report)
            if watched is None:
                continue
            for past in watched.reader.past():
                self._limits.learn(past.phase, past.stood_s, cold=past.cold)
            found.append((self._beat(report, report.rank, watched), watched))
        return found

    def _watched_of(self, report: WorkerReport) -> _Watched | None:
        watched = self._watched.get(report.worker)
        if watched is None:
            try:
                reader = BeaconReader(path_of(self._folder, report.worker))
            except FileNotFoundError:  # the worker ended just now
                return None
            except OSError:  # of this one alone: the others must be looked at
                traceback.print_exc()
                return None
            most_s = HELD_UP_TURNS * self._config.watch_period_s
            watched = self._watched[report.worker] = _Watched(reader, most_s)
        watched.seat(report.attempt)
        return watched

    def _beat(self, report: WorkerReport, rank: int, watched: _Watched) -> Beat:
        reading = watched.reader.read()
        if reading is None or reading.attempt != report.attempt:
            reading = Reading(0, JOINING, report.attempt, 0, 0, 0.0, True, watched.seated_ns, ())
        watched.changed_ns = reading.changed_ns
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
        )
