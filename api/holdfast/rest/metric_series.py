"""Every series of `/metrics`, by name: what it counts, and by which labels. Values alone, so that
the reference in the docs and the check of dashboards and alerts read what the server really has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def family(self) -> Any:
        """Without values yet."""
        return _FAMILIES[self.kind](self.name, self.help, labels=self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """As queries name it."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}

HTTP_SERIES = (
    Series(
        "holdfast_http_requests_total",
        Kind.COUNTER,
        "Requests answered, by route and never by path.",
        ("method", "route", "status"),
    ),
    Series(
        "holdfast_http_request_seconds",
        Kind.HISTOGRAM,
        "Time to the head of the response.",
        ("method", "route"),
    ),
)
FLEET_SERIES = (
    Series("holdfast_jobs", Kind.GAUGE, "Jobs, by state.", ("state",)),
    Series(
        "holdfast_job_transitions_total",
        Kind.COUNTER,
        "Changes of a job's state that this server has stored; reason: the outcome's code, if any.",
        ("from", "to", "reason"),
    ),
    Series(
        "holdfast_incidents_total",
        Kind.COUNTER,
        "Faults that are over.",
        ("cause", "decision"),
    ),
    Series(
        "holdfast_recovery_seconds",
        Kind.HISTOGRAM,
        "How long each phase of a recovery took; `total`: from the signal to the first new step.",
        ("phase",),
    ),
    Series(
        "holdfast_checkpoint_seconds",
        Kind.HISTOGRAM,
        "By tier and op, as this server has stored them. memory, wait: how long a step waited for "
        "its copy; remote, save: from the end of the step until the checkpoint is durable.",
        ("tier", "op"),
    ),
    Series(
        "holdfast_reconcile_lag_seconds",
        Kind.HISTOGRAM,
        "From when a job was due to be looked at, or its user asked for something, until this "
        "server had done what was next.",
    ),
    Series("holdfast_lost_steps_total", Kind.COUNTER, "Steps that had to be made again."),
    Series(
        "holdfast_effective_training_seconds_total",
        Kind.COUNTER,
        "Time in steps that are part of history, all jobs together.",
    ),
    Series(
        "holdfast_cluster_seconds_total",
        Kind.COUNTER,
        "Time that jobs were on the cluster, all together.",
    ),
    Series("holdfast_goodput_ratio", Kind.GAUGE, "The former over the latter, since ever."),
)
_OF_JOB = ("job_id", "name")
JOB_SERIES = (
    Series("holdfast_job_step", Kind.GAUGE, "Optimizer steps applied.", _OF_JOB),
    Series("holdfast_job_attempt", Kind.GAUGE, "Number of the attempt.", _OF_JOB),
    Series("holdfast_job_incidents", Kind.GAUGE, "Faults so far.", _OF_JOB),
    Series("holdfast_job_tokens_per_second", Kind.GAUGE, "Throughput.", _OF_JOB),
    Series(
        "holdfast_job_goodput",
        Kind.GAUGE,
        "Time in steps that are part of history, over the time on the cluster.",
        _OF_JOB,
    ),
    Series(
        "holdfast_job_effective_training_time_ratio",
        Kind.GAUGE,
        "Time in which training advanced, over the time on the cluster.",
        _OF_JOB,
    ),
)
"""Only where `HOLDFAST_METRICS_OF_JOBS` is set."""
SERIES = (*HTTP_SERIES, *FLEET_SERIES, *JOB_SERIES)
