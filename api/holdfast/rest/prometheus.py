"""`/metrics`: the server's own figures and those of live jobs, in Prometheus' text format."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.rest.services import JobsDep
from holdfast_service.jobs import JobService
from holdfast_service.lifecycle import State

router = APIRouter(tags=["health"])

LIVE_JOBS_SHOWN = 200
GOODPUT_AGE_S = 30.0
METHODS = frozenset({"GET", "POST", "HEAD"})


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def metrics(request: Request, jobs: JobsDep) -> Response:
    registry: CollectorRegistry = request.app.state.registry
    text = generate_latest(registry) + generate_latest(await _live_jobs(jobs))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class Measured:
    """ASGI middleware that counts and times requests, by route and never by path: paths bear ids,
    which are without end."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter(
            "holdfast_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "holdfast_http_request_seconds",
            "Time to the head of the response.",
            ("method", "route"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope, message["status"], began)
            await send(message)

        try:
            await self._app(scope, receive, measured)
        except Exception:
            self._observe(scope, 500, began)
            raise

    def _observe(self, scope: Scope, status: int, began: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._count.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(time.perf_counter() - began)


async def _live_jobs(jobs: JobService) -> CollectorRegistry:
    registry = CollectorRegistry()
    states = Gauge("holdfast_live_jobs", "Jobs that have not ended.", ["state"], registry=registry)
    labels = ("job_id", "name")
    step = Gauge("holdfast_job_step", "Optimizer steps applied.", labels, registry=registry)
    attempt = Gauge("holdfast_job_attempt", "Number of the attempt.", labels, registry=registry)
    faults = Gauge("holdfast_job_incidents", "Faults so far.", labels, registry=registry)
    speed = Gauge("holdfast_job_tokens_per_second", "Throughput.", labels, registry=registry)
    useful = Gauge(
        "holdfast_job_goodput",
        "Time in steps that are part of history, over the time on the cluster.",
        labels,
        registry=registry,
    )
    effective = Gauge(
        "holdfast_job_effective_training_time_ratio",
        "Time in which training advanced, over the time on the cluster.",
        labels,
        registry=registry,
    )
    live = [state for state in State if not state.terminal]
    for state in live:
        states.labels(state.value).set(0)
    for job in (await jobs.list(limit=LIVE_JOBS_SHOWN, state=live)).jobs:
        states.labels(job.state.value).inc()
        step.labels(job.id, job.name).set(job.progress.step)
        attempt.labels(job.id, job.name).set(job.progress.attempt)
        faults.labels(job.id, job.name).set(job.progress.incidents)
        if job.progress.tokens_per_second is not None:  # not measured is not zero
            speed.labels(job.id, job.name).set(job.progress.tokens_per_second)
        told = await jobs.goodput(job.id, max_age_s=GOODPUT_AGE_S)
        if told.goodput is not None and told.effective_training_time_ratio is not None:
            useful.labels(job.id, job.name).set(told.goodput)
            effective.labels(job.id, job.name).set(told.effective_training_time_ratio)
    return registry
