"""How a node's ranks stand, as metrics of Ray: they come out of the node's own exporter.

Set by each node agent for its own ranks, every few seconds, from what it knows anyway. A rank that
has left the node leaves its series at -1 until the agent ends, as Ray's gauges cannot be taken
back. Where Ray collects no metrics, setting them costs next to nothing.
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


STEP = RankSeries("holdfast_rank_step", "The step that a rank is at; -1: it has left the node.")
ATTEMPT = RankSeries("holdfast_rank_attempt", "The attempt that a rank belongs to.")
SILENT = RankSeries(
    "holdfast_rank_silent_seconds", "For how long a rank has given no sign of life."
)
LIMIT = RankSeries(
    "holdfast_rank_silence_limit_seconds", "How long it may, in its phase, as learned so far."
)
PHASE = RankSeries(
    "holdfast_rank_phase",
    "1 for the phase that a rank is in, 0 for others.",
    ("job", "rank", "phase"),
)
STEP_TIME = RankSeries(
    "holdfast_step_seconds", "What the newest step of the job took, as this node saw it.", ("job",)
)
COMPUTE = RankSeries(
    "holdfast_rank_compute_seconds", "What a rank worked on that step itself, without waiting."
)
GAUGES = (STEP, ATTEMPT, SILENT, LIMIT, PHASE, STEP_TIME, COMPUTE)


@dataclass(frozen=True)
class Sample:
    """A value of a series for its labels but the job."""

    series: RankSeries
    value: float
    rank: str = ""
    phase: str = ""


def samples(
    beats: tuple[Beat, ...], newest: StepRow | None, known: set[tuple[str, str]]
) -> list[Sample]:
    """What is to be set. `known`: (rank, phase) that were set before; it is brought up to date.
    Pure but for that."""
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
    """Sets them in a thread of its own, until the process ends."""

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
            except Exception:  # metrics must not end with a turn that failed
                _log.exception("cannot set the metrics of the ranks")

    def _export_once(self) -> None:
        beats, newest = self._read_progress()
        for sample in samples(beats, newest, self._known):
            values = {"job": self._job, "rank": sample.rank, "phase": sample.phase}
            labels = {name: values[name] for name in sample.series.labels}
            self._gauges[sample.series.name].set(sample.value, labels)
