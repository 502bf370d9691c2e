"""`/metrics` in Prometheus' text format: metrics of the server, totals over all jobs and, if
enabled in the settings, metrics of each live job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.rest.monitoring.health_probes import OK, run_probes
from holdfast.rest.monitoring.metric_series import FLEET_SERIES, HTTP_SERIES, JOB_SERIES, Series
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


class Families(Collector):
    """The values of these series at one time."""

    def __init__(self, series: Iterable[Series]) -> None:
        self._by_name = {item.name: item.family() for item in series}

    def add(self, name: str, value: Distribution | float | None, *labels: str) -> None:
        """A value of None was not measured, and is left out: it is not zero."""
        if isinstance(value, Distribution):
            self._by_name[name].add_metric(labels, value.buckets(), value.total_s)
        elif value is not None:
            self._by_name[name].add_metric(labels, value)

    def collect(self) -> Iterable[Any]:
        return self._by_name.values()


def _fleet(store: Store, statistics: FleetStatistics, checks: Mapping[str, str]) -> Families:
    """Metrics computed from the store (equal on every server and after a restart), and what this
    server has counted."""
    families = Families(FLEET_SERIES)
    _add_present(families, statistics)
    for part, result in checks.items():
        families.add("holdfast_ready", int(result == OK), part)
    for edge, count in sorted(store.transitions.items()):
        families.add("holdfast_job_transitions_total", count, *edge)
    # Zero from the start: the rate of a series that begins with its first case misses that case.
    incidents = {**{(cause.value, ""): 0 for cause in Cause}, **statistics.incidents}
    for (cause, decision), count in sorted(incidents.items()):
        families.add("holdfast_incidents_total", count, cause, decision)
    phases = {"total": Distribution(), **statistics.phases}
    for phase, histogram in sorted(phases.items()):
        families.add("holdfast_recovery_seconds", histogram, phase)
    checkpoints = {("remote", "save"): Distribution(), **store.checkpoints}
    for (tier, operation), histogram in sorted(checkpoints.items()):
        families.add("holdfast_checkpoint_seconds", histogram, tier, operation)
    families.add("holdfast_reconcile_lag_seconds", store.reconcile_lag)
    families.add("holdfast_lost_steps_total", statistics.lost_steps)
    families.add("holdfast_effective_training_seconds_total", statistics.effective_s)
    families.add("holdfast_cluster_seconds_total", statistics.held_s)
    families.add("holdfast_goodput_ratio", statistics.goodput)
    _add_growth(families, store.growth)
    return families


def _add_present(families: Families, statistics: FleetStatistics) -> None:
    """Add the series of the present state: jobs, the queue, ranks, nodes, and work that waits."""
    for state in State:
        families.add("holdfast_jobs", statistics.jobs.get(state.value, 0), state.value)
    for resource, wait in sorted(statistics.waits.items()):
        families.add("holdfast_waiting_jobs", wait.jobs, resource)
        families.add("holdfast_longest_wait_seconds", wait.longest_s, resource)
    families.add("holdfast_ranks", statistics.ranks)
    for standing in NodeStanding:
        families.add("holdfast_nodes", statistics.nodes.get(standing, 0), standing)
    for cause, count in sorted(statistics.open_incidents.items()):
        families.add("holdfast_open_incidents", count, cause)
    families.add("holdfast_unreleased_jobs", statistics.unreleased_jobs)
    families.add("holdfast_unsent_webhooks", statistics.unsent_webhooks)
    families.add("holdfast_data_bound_jobs", statistics.data_bound_jobs)


def _add_growth(families: Families, growth: GrowthPlan) -> None:
    if growth.bounds is None:
        return
    asked = sum(request.new for request in growth.requests.values())
    families.add("holdfast_growth_asked_nodes", asked)
    families.add("holdfast_growth_refused_jobs", len(growth.refused))
    for resource, size in asdict(growth.size).items():
        families.add("holdfast_growth_size", size, resource)
    for resource, bound in growth.bounds.by_resource.items():
        families.add("holdfast_growth_bound", bound, resource)


async def _live_jobs(overview: Overview, jobs: JobService) -> Families:
    """The series of each live job. Only on request: the number of jobs is unbounded."""
    families = Families(JOB_SERIES)
    live = frozenset(state for state in State if not state.terminal)
    for job in (await overview.rows(Filters(states=live), limit=MAX_LIVE_JOBS)).items:
        goodput = await jobs.history.goodput(job.id, max_age_s=GOODPUT_AGE_S)
        values = {
            "step": job.step,
            "attempt": job.attempt,
            "incidents": job.incidents,
            "tokens_per_second": job.tokens_per_second,
            "goodput": goodput.goodput,
            "effective_training_time_ratio": goodput.effective_training_time_ratio,
        }
        for name, value in values.items():
            families.add(f"holdfast_job_{name}", value, job.id, job.name)
    return families
