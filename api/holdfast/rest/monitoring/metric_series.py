"""Every series of `/metrics`: name, kind, help and labels. Only data, so that the reference in the
docs and the check of dashboards and alerts read the same definitions as the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)


class SeriesKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    name: str
    kind: SeriesKind
    help: str
    labels: tuple[str, ...] = ()

    def family(self) -> Any:
        """An empty family of this series."""
        return _FAMILIES[self.kind](self.name, self.help, labels=self.labels)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in queries."""
        if self.kind is SeriesKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


_FAMILIES: dict[SeriesKind, Any] = {
    SeriesKind.COUNTER: CounterMetricFamily,
    SeriesKind.GAUGE: GaugeMetricFamily,
    SeriesKind.HISTOGRAM: HistogramMetricFamily,
}

HTTP_SERIES = (
    Series(
        "holdfast_http_requests_total",
        SeriesKind.COUNTER,
        "Answered requests, by route (not by path).",
        ("method", "route", "status"),
    ),
    Series(
        "holdfast_http_request_seconds",
        SeriesKind.HISTOGRAM,
        "Time to the head of the response.",
        ("method", "route"),
    ),
)
FLEET_SERIES = (
    Series("holdfast_jobs", SeriesKind.GAUGE, "Jobs, by state.", ("state",)),
    Series(
        "holdfast_ready",
        SeriesKind.GAUGE,
        "1 for each part of `/readyz` that answers this server, 0 for one that does not.",
        ("part",),
    ),
    Series(
        "holdfast_waiting_jobs",
        SeriesKind.GAUGE,
        "Queued jobs, by what they wait for.",
        ("resource",),
    ),
    Series(
        "holdfast_longest_wait_seconds",
        SeriesKind.GAUGE,
        "The longest present stay of a job in the queue, by what it waits for now.",
        ("resource",),
    ),
    Series("holdfast_ranks", SeriesKind.GAUGE, "Ranks that train, of all jobs together."),
    Series(
        "holdfast_nodes",
        SeriesKind.GAUGE,
        "Present nodes: ready, quarantined by the service, or cordoned by a person.",
        ("standing",),
    ),
    Series(
        "holdfast_open_incidents",
        SeriesKind.GAUGE,
        "Incidents that have not closed, of jobs that have not ended.",
        ("cause",),
    ),
    Series(
        "holdfast_unreleased_jobs",
        SeriesKind.GAUGE,
        "Ended jobs that may still hold something on the cluster.",
    ),
    Series(
        "holdfast_unsent_webhooks",
        SeriesKind.GAUGE,
        "Webhook messages that the receiver has not accepted yet.",
    ),
    Series(
        "holdfast_job_transitions_total",
        SeriesKind.COUNTER,
        "State changes of jobs, stored by this server; reason: the outcome's code, if any.",
        ("from", "to", "reason"),
    ),
    Series(
        "holdfast_incidents_total",
        SeriesKind.COUNTER,
        "Closed incidents.",
        ("cause", "decision"),
    ),
    Series(
        "holdfast_recovery_seconds",
        SeriesKind.HISTOGRAM,
        "Duration of each phase of a recovery; `total`: from the signal to the first new step.",
        ("phase",),
    ),
    Series(
        "holdfast_checkpoint_seconds",
        SeriesKind.HISTOGRAM,
        "By tier and op, as stored by this server. memory, wait: time that a step waited for its "
        "copy; remote, save: time from the end of the step until the checkpoint is durable.",
        ("tier", "op"),
    ),
    Series(
        "holdfast_reconcile_lag_seconds",
        SeriesKind.HISTOGRAM,
        "Time from the due time of a job, or a user's command, until this server has completed "
        "the next action.",
    ),
    Series(
        "holdfast_growth_asked_nodes",
        SeriesKind.GAUGE,
        "New nodes that the cluster's autoscaler is asked for, for queued jobs. Without "
        "HOLDFAST_AUTOSCALE the growth series are absent; every server reports the same.",
    ),
    Series(
        "holdfast_growth_refused_jobs",
        SeriesKind.GAUGE,
        "Queued jobs, of the first 20 that wait for nodes, for which the bounds allow no growth.",
    ),
    Series(
        "holdfast_growth_size",
        SeriesKind.GAUGE,
        "Nodes, CPUs and GPUs of the cluster once it has all that it is asked for.",
        ("resource",),
    ),
    Series(
        "holdfast_growth_bound",
        SeriesKind.GAUGE,
        "The bounds HOLDFAST_AUTOSCALE_NODES, _CPUS and _GPUS, those that are set.",
        ("resource",),
    ),
    Series("holdfast_lost_steps_total", SeriesKind.COUNTER, "Repeated steps."),
    Series(
        "holdfast_effective_training_seconds_total",
        SeriesKind.COUNTER,
        "Time in steps of the final history, summed over all jobs.",
    ),
    Series(
        "holdfast_cluster_seconds_total",
        SeriesKind.COUNTER,
        "Time on the cluster, summed over all jobs.",
    ),
    Series(
        "holdfast_goodput_ratio",
        SeriesKind.GAUGE,
        "holdfast_effective_training_seconds_total / holdfast_cluster_seconds_total.",
    ),
)
_JOB_LABELS = ("job_id", "name")
JOB_SERIES = (
    Series("holdfast_job_step", SeriesKind.GAUGE, "Applied optimizer steps.", _JOB_LABELS),
    Series("holdfast_job_attempt", SeriesKind.GAUGE, "Number of the present attempt.", _JOB_LABELS),
    Series("holdfast_job_incidents", SeriesKind.GAUGE, "Incidents so far.", _JOB_LABELS),
    Series("holdfast_job_tokens_per_second", SeriesKind.GAUGE, "Throughput.", _JOB_LABELS),
    Series(
        "holdfast_job_goodput",
        SeriesKind.GAUGE,
        "Time in steps of the final history over the time on the cluster.",
        _JOB_LABELS,
    ),
    Series(
        "holdfast_job_effective_training_time_ratio",
        SeriesKind.GAUGE,
        "Time in which training advanced over the time on the cluster.",
        _JOB_LABELS,
    ),
)
"""Present only if `HOLDFAST_METRICS_OF_JOBS` is set."""
SERIES = (*HTTP_SERIES, *FLEET_SERIES, *JOB_SERIES)
