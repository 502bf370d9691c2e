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
    labels: tuple[str, ...]

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


def _counter(name: str, help: str, *labels: str) -> Series:
    return Series(name, SeriesKind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Series:
    return Series(name, SeriesKind.GAUGE, help, labels)


def _histogram(name: str, help: str, *labels: str) -> Series:
    return Series(name, SeriesKind.HISTOGRAM, help, labels)


HTTP_SERIES = (
    _counter(
        "holdfast_http_requests_total",
        "Answered requests, by route (not by path).",
        "method",
        "route",
        "status",
    ),
    _histogram(
        "holdfast_http_request_seconds", "Time to the head of the response.", "method", "route"
    ),
)
FLEET_SERIES = (
    _gauge("holdfast_jobs", "Jobs, by state.", "state"),
    _gauge(
        "holdfast_ready",
        "1 for each part of `/readyz` that answers this server, 0 for one that does not.",
        "part",
    ),
    _gauge("holdfast_waiting_jobs", "Queued jobs, by what they wait for.", "resource"),
    _gauge(
        "holdfast_longest_wait_seconds",
        "The longest present stay of a job in the queue, by what it waits for now.",
        "resource",
    ),
    _gauge("holdfast_ranks", "Ranks that train, of all jobs together."),
    _gauge(
        "holdfast_nodes",
        "Present nodes: ready, quarantined by the service, or cordoned by a person.",
        "standing",
    ),
    _gauge(
        "holdfast_open_incidents",
        "Incidents that have not closed, of jobs that have not ended.",
        "cause",
    ),
    _gauge("holdfast_unreleased_jobs", "Ended jobs that may still hold something on the cluster."),
    _gauge("holdfast_unsent_webhooks", "Webhook messages that the receiver has not accepted yet."),
    _gauge(
        "holdfast_data_bound_jobs",
        "Running jobs of whose last steps a tenth or more was a wait for data, or that stand for "
        "want of data.",
    ),
    _counter(
        "holdfast_job_transitions_total",
        "State changes of jobs, stored by this server; reason: the outcome's code, if any.",
        "from",
        "to",
        "reason",
    ),
    _counter("holdfast_incidents_total", "Closed incidents.", "cause", "decision"),
    _histogram(
        "holdfast_recovery_seconds",
        "Duration of each phase of a recovery; `total`: from the signal to the first step of "
        "the next attempt.",
        "phase",
    ),
    _histogram(
        "holdfast_checkpoint_seconds",
        "By tier and op, as stored by this server. memory, wait: time that a step waited for its "
        "copy; remote, save: time from the end of the step until the checkpoint is durable.",
        "tier",
        "op",
    ),
    _histogram(
        "holdfast_reconcile_lag_seconds",
        "Time from the due time of a job, or a user's command, until this server has completed "
        "the next action.",
    ),
    _gauge(
        "holdfast_growth_asked_nodes",
        "New nodes that the cluster's autoscaler is asked for, for queued jobs. Without "
        "HOLDFAST_AUTOSCALE the growth series are absent; every server reports the same.",
    ),
    _gauge(
        "holdfast_growth_refused_jobs",
        "Queued jobs, of the first 20 that wait for nodes, for which the bounds allow no growth.",
    ),
    _gauge(
        "holdfast_growth_size",
        "Nodes, CPUs and GPUs of the cluster once it has all that it is asked for.",
        "resource",
    ),
    _gauge(
        "holdfast_growth_bound",
        "The bounds HOLDFAST_AUTOSCALE_NODES, _CPUS and _GPUS, those that are set.",
        "resource",
    ),
    _counter("holdfast_lost_steps_total", "Repeated steps."),
    _counter(
        "holdfast_effective_training_seconds_total",
        "Time in steps of the final history, summed over all jobs.",
    ),
    _counter("holdfast_cluster_seconds_total", "Time on the cluster, summed over all jobs."),
    _gauge(
        "holdfast_goodput_ratio",
        "holdfast_effective_training_seconds_total / holdfast_cluster_seconds_total.",
    ),
)
_JOB_LABELS = ("job_id", "name")
JOB_SERIES = (
    _gauge("holdfast_job_step", "Applied optimizer steps.", *_JOB_LABELS),
    _gauge("holdfast_job_attempt", "Number of the present attempt.", *_JOB_LABELS),
    _gauge("holdfast_job_incidents", "Incidents so far.", *_JOB_LABELS),
    _gauge("holdfast_job_tokens_per_second", "Throughput.", *_JOB_LABELS),
    _gauge(
        "holdfast_job_goodput",
        "Time in steps of the final history over the time on the cluster.",
        *_JOB_LABELS,
    ),
    _gauge(
        "holdfast_job_effective_training_time_ratio",
        "Time in which training advanced over the time on the cluster.",
        *_JOB_LABELS,
    ),
)
"""Present only if `HOLDFAST_METRICS_OF_JOBS` is set."""
SERIES = (*HTTP_SERIES, *FLEET_SERIES, *JOB_SERIES)
