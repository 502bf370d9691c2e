"""`/metrics` in Prometheus' text format: metrics of the server, totals over all jobs and, if
enabled in the settings, metrics of each live job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.rest.monitoring.health_probes import OK, run_probes
from holdfast.rest.monitoring.metric_series import FLEET_SERIES, HTTP_SERIES, JOB_SERIES
from holdfast.rest.services import ServicesDep
from holdfast_service.job_model.cluster_growth import GrowthPlan
from holdfast_service.job_model.lifecycle import State
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.readers.fleet_metrics import FleetStatistics
from holdfast_service.services.jobs import JobService
from holdfast_service.services.overview import Overview
from holdfast_service.store.engine import Store
from holdfast_service.store.latency_histogram import Distribution
from holdfast_service.store.listing import Filters

router = APIRouter(tags=["health"])

MAX_LIVE_JOBS = 200
GOODPUT_AGE_S = 30.0
Families = Mapping[str, Any]
"""Series that are filled, by name."""
METHODS = frozenset({"GET", "POST", "HEAD"})


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
async def metrics(request: Request, services: ServicesDep) -> Response:
    registry: CollectorRegistry = request.app.state.registry
    checks, statistics = await asyncio.gather(
        run_probes(services), services.fleet.statistics(time.time())
    )
    fleet = _fleet(services.fleet.store, statistics, checks)
    text = generate_latest(registry) + generate_latest(fleet)
    if services.metrics_of_jobs:
        text += generate_latest(await _live_jobs(services.overview, services.jobs))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class RequestMetrics:
    """ASGI middleware that counts and times requests by route, not by path: ids in paths would make
    the number of series unbounded."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        count, seconds = HTTP_SERIES
        self._count = Counter(count.name, count.help, count.labels, registry=registry)
        self._seconds = Histogram(seconds.name, seconds.help, seconds.labels, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope, message["status"], started)
            await send(message)

        try:
            await self._app(scope, receive, send_measured)
        except Exception:
            self._observe(scope, 500, started)
            raise

    def _observe(self, scope: Scope, status: int, started: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._count.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(time.perf_counter() - started)


def _fleet(
    store: Store, statistics: FleetStatistics, checks: Mapping[str, str]
) -> CollectorRegistry:
    """Metrics computed from the store (equal on every server and after a restart), and what this
    server has counted."""
    families = {series.name: series.family() for series in FLEET_SERIES}
    _add_present(families, statistics)
    for part, result in checks.items():
        families["holdfast_ready"].add_metric([part], int(result == OK))
    for edge, count in sorted(store.transitions.items()):
        families["holdfast_job_transitions_total"].add_metric(list(edge), count)
    # Zero from the start: the rate of a series that begins with its first case misses that case.
    incidents = {**{(cause.value, ""): 0 for cause in Cause}, **statistics.incidents}
    for (cause, decision), count in sorted(incidents.items()):
        families["holdfast_incidents_total"].add_metric([cause, decision], count)
    phases = {"total": Distribution(), **statistics.phases}
    for phase, histogram in sorted(phases.items()):
        families["holdfast_recovery_seconds"].add_metric(
            [phase], histogram.buckets(), histogram.total_s
        )
    checkpoints = {("remote", "save"): Distribution(), **store.checkpoints}
    for (tier, operation), histogram in sorted(checkpoints.items()):
        families["holdfast_checkpoint_seconds"].add_metric(
            [tier, operation], histogram.buckets(), histogram.total_s
        )
    lag = store.reconcile_lag
    families["holdfast_reconcile_lag_seconds"].add_metric([], lag.buckets(), lag.total_s)
    families["holdfast_lost_steps_total"].add_metric([], statistics.lost_steps)
    families["holdfast_effective_training_seconds_total"].add_metric([], statistics.effective_s)
    families["holdfast_cluster_seconds_total"].add_metric([], statistics.held_s)
    if statistics.goodput is not None:  # what was not measured is not zero
        families["holdfast_goodput_ratio"].add_metric([], statistics.goodput)
    _add_growth(families, store.growth)
    registry = CollectorRegistry()
    registry.register(_FixedCollector(list(families.values())))
    return registry


def _add_present(families: Families, statistics: FleetStatistics) -> None:
    """Add the series of the present state: jobs, the queue, ranks, nodes, and work that waits."""
    for state in State:
        families["holdfast_jobs"].add_metric([state.value], statistics.jobs.get(state.value, 0))
    for resource, wait in sorted(statistics.waits.items()):
        families["holdfast_waiting_jobs"].add_metric([resource], wait.jobs)
        families["holdfast_longest_wait_seconds"].add_metric([resource], wait.longest_s)
    families["holdfast_ranks"].add_metric([], statistics.ranks)
    for standing in NodeStanding:
        families["holdfast_nodes"].add_metric([standing], statistics.nodes.get(standing, 0))
    for cause, count in sorted(statistics.open_incidents.items()):
        families["holdfast_open_incidents"].add_metric([cause], count)
    families["holdfast_unreleased_jobs"].add_metric([], statistics.unreleased_jobs)
    families["holdfast_unsent_webhooks"].add_metric([], statistics.unsent_webhooks)


def _add_growth(families: Families, growth: GrowthPlan) -> None:
    if growth.bounds is None:
        return
    asked = sum(request.new for request in growth.requests.values())
    families["holdfast_growth_asked_nodes"].add_metric([], asked)
    families["holdfast_growth_refused_jobs"].add_metric([], len(growth.refused))
    for resource, size in asdict(growth.size).items():
        families["holdfast_growth_size"].add_metric([resource], size)
    for resource, bound in growth.bounds.by_resource.items():
        families["holdfast_growth_bound"].add_metric([resource], bound)


class _FixedCollector(Collector):
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


async def _live_jobs(overview: Overview, jobs: JobService) -> CollectorRegistry:
    """The series of each live job. Only on request: the number of jobs is unbounded."""
    registry = CollectorRegistry()
    gauges = {
        series.name: Gauge(series.name, series.help, series.labels, registry=registry)
        for series in JOB_SERIES
    }
    live = frozenset(state for state in State if not state.terminal)
    for job in (await overview.rows(Filters(states=live), limit=MAX_LIVE_JOBS)).items:
        goodput = await jobs.history.goodput(job.id, max_age_s=GOODPUT_AGE_S)
        values = {
            "holdfast_job_step": job.step,
            "holdfast_job_attempt": job.attempt,
            "holdfast_job_incidents": job.incidents,
            "holdfast_job_tokens_per_second": job.tokens_per_second,
            "holdfast_job_goodput": goodput.goodput,
            "holdfast_job_effective_training_time_ratio": goodput.effective_training_time_ratio,
        }
        for name, value in values.items():
            if value is not None:  # what was not measured is not zero
                gauges[name].labels(job.id, job.name).set(value)
    return registry
