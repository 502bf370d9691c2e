"""Exports the progress of a node's ranks as Ray metrics, through the node's own exporter.

Each node agent sets the metrics of its own ranks every few seconds. The series of a rank that has
left the node stays at -1 until the agent ends, because Ray's gauges cannot be removed. Where Ray
collects no metrics, setting them costs next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from ray.util.metrics import Gauge

from holdfast_workers.protocol.messages import Beat, StepRow

PERIOD_S = 2.0
GONE = -1.0
_log = structlog.get_logger()


@dataclass(frozen=True)
class RankSeries:
    name: str
    help: str
    labels: tuple[str, ...] = ("job", "rank")


STEP = RankSeries(
    "holdfast_rank_step", "The step that a rank is in; -1: the rank has left the node."
)
ATTEMPT = RankSeries("holdfast_rank_attempt", "The attempt that a rank belongs to.")
SILENT = RankSeries("holdfast_rank_silent_seconds", "Seconds since the last heartbeat of a rank.")
LIMIT = RankSeries(
    "holdfast_rank_silence_limit_seconds",
    "Learned limit of the silence of a rank in its present phase.",
)
PHASE = RankSeries(
    "holdfast_rank_phase",
    "1 for the present phase of a rank, 0 for other phases.",
    ("job", "rank", "phase"),
)
STEP_TIME = RankSeries(
    "holdfast_step_seconds",
    "Duration of the newest step of the job, as measured on this node.",
    ("job",),
)
COMPUTE = RankSeries(
    "holdfast_rank_compute_seconds", "Compute time of a rank in that step, without waiting."
)
GAUGES = (STEP, ATTEMPT, SILENT, LIMIT, PHASE, STEP_TIME, COMPUTE)


@dataclass(frozen=True)
class Sample:
    """A value of a series, with its labels except the job."""

    series: RankSeries
    value: float
    rank: str = ""
    phase: str = ""


def samples(
    beats: tuple[Beat, ...], newest: StepRow | None, known: set[tuple[str, str]]
) -> list[Sample]:
    """The samples to set. `known`: the (rank, phase) pairs set before; updated in place."""
    found: list[Sample] = []
    here = {str(beat.rank): beat.phase for beat in beats}
    for rank, phase in sorted(known):
        if here.get(rank) != phase:
            found.append(Sample(PHASE, 0.0, rank, phase))
    for rank in sorted({rank for rank, _ in known} - here.keys()):
        found.append(Sample(STEP, GONE, rank))
    known |= set(here.items())
    for beat in beats:
        rank = str(beat.rank)
        found += [
            Sample(STEP, float(beat.step), rank),
            Sample(ATTEMPT, float(beat.attempt), rank),
            Sample(SILENT, beat.age_s, rank),
            Sample(LIMIT, beat.limit_s, rank),
            Sample(PHASE, 1.0, rank, beat.phase),
        ]
        if newest is not None and beat.rank < len(newest.compute_s):
            found.append(Sample(COMPUTE, newest.compute_s[beat.rank], rank))
    if newest is not None:
        found.append(Sample(STEP_TIME, newest.step_time_s))
    return found


class RankMetrics:
    """Exports the metrics in a daemon thread until `stop`."""

    def __init__(
        self, job: str, read_progress: Callable[[], tuple[tuple[Beat, ...], StepRow | None]]
    ) -> None:
        self._job = job
        self._read_progress = read_progress
        self._known: set[tuple[str, str]] = set()
        self._stopped = threading.Event()
        self._gauges = {gauge.name: Gauge(gauge.name, gauge.help, gauge.labels) for gauge in GAUGES}

    def start(self) -> None:
        threading.Thread(target=self._run, name="rank-metrics", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            try:
                self._export_once()
            except Exception:  # a failed export must not end the metrics
                _log.exception("cannot set the metrics of the ranks")

    def _export_once(self) -> None:
        beats, newest = self._read_progress()
        for sample in samples(beats, newest, self._known):
            values = {"job": self._job, "rank": sample.rank, "phase": sample.phase}
            labels = {name: values[name] for name in sample.series.labels}
            self._gauges[sample.series.name].set(sample.value, labels)
