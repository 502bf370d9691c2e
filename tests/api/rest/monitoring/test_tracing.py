"""A trace per request, named by its route, and a trace per incident, with its phases."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.rest.app import create_app
from holdfast.rest.monitoring import tracing
from holdfast.rest.services import Services
from holdfast_service.job_model.events.codec import read_incident
from holdfast_service.job_model.events.incidents import IncidentRecord

INCIDENT = {
    "incident": 2,
    "cause": "worker_crash",
    "decision": "replace the worker",
    "attempt": 1,
    "steps_lost": 0,
    "signalled_at": 100.0,
    "opened_at": 100.01,
    "closed_at": 100.4,
    "phases_s": {"form": 0.2, "detect": 0.1, "first_step": 0.1, "total": 0.4},
}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def sender(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_without_an_endpoint_there_is_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing.provider() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    provider = tracing.provider()
    assert provider is not None
    provider.shutdown()


def test_an_incident_is_one_trace_with_its_phases(
    exporter: InMemorySpanExporter, sender: TracerProvider
) -> None:
    tracing.incident_tracer(sender)("job-1", read_incident(1, INCIDENT))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["detect", "form", "first_step", "incident worker_crash"]
    root = spans["incident worker_crash"]
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert {span.parent.span_id for span in spans.values() if span.parent} == {root.context.span_id}
    assert root.attributes is not None
    assert root.attributes["holdfast.decision"] == "replace the worker"
    assert root.start_time == 100_000_000_000
    assert spans["form"].start_time == spans["detect"].end_time


def test_an_unreadable_incident_gives_no_trace_and_no_error(
    exporter: InMemorySpanExporter, sender: TracerProvider
) -> None:
    endless = IncidentRecord(incident=1, phases_s={"form": math.inf})
    tracing.incident_tracer(sender)("job-1", endless)
    assert not exporter.get_finished_spans()


async def test_a_request_is_one_span_named_by_its_route_and_with_its_id(
    exporter: InMemorySpanExporter, sender: TracerProvider
) -> None:
    services = SimpleNamespace(allowed_hosts={"holdfast"}, allowed_origins=frozenset(), access=None)
    app = create_app(cast(Services, services))
    tracing.trace_requests(app, sender)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://holdfast") as client:
        answer = await client.get("/api/v1/jobs/17", headers={"X-Request-Id": "mine"})
        await client.get("/metrics")
    assert answer.headers["x-request-id"] == "mine"
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /api/v1/jobs/{job_id}"
    assert span.attributes is not None
    assert span.attributes["http.response.header.x_request_id"] == ("mine",)
