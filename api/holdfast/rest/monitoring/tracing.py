"""OpenTelemetry: a trace per request and per incident, if `OTEL_EXPORTER_OTLP_ENDPOINT` (or
`..._TRACES_ENDPOINT`) names an endpoint. Without an endpoint no OpenTelemetry module is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from fastapi import FastAPI

from holdfast.rest.http import request_ids
from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.views.incident_trace import spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NOT_TRACED = "healthz,readyz,metrics"
_NANO = 1_000_000_000

_log = structlog.get_logger()


def provider() -> TracerProvider | None:
    """A provider that exports spans in a thread of its own; None without an endpoint."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    tracer_provider = TracerProvider(resource=Resource.create({"service.name": "holdfast"}))
    tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return tracer_provider


def trace_requests(app: FastAPI, sender: TracerProvider) -> None:
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(
        app,
        tracer_provider=sender,
        excluded_urls=NOT_TRACED,
        exclude_spans=["receive", "send"],
        http_capture_headers_server_response=[request_ids.HEADER],
    )


def incident_tracer(sender: TracerProvider) -> Callable[[str, IncidentRecord], None]:
    """A function to call with each closed incident after it is stored; it exports a trace."""
    from opentelemetry.trace import set_span_in_context

    tracer = sender.get_tracer("holdfast")

    def trace(job_id: str, incident: IncidentRecord) -> None:
        try:
            recovery, *phases = spans(job_id, incident)
        except ValueError as error:
            _log.warning("cannot trace an incident", job=job_id, error=str(error))
            return
        root = tracer.start_span(
            recovery.name, start_time=_ns(recovery.begins), attributes=dict(recovery.attributes)
        )
        context = set_span_in_context(root)
        for phase in phases:
            child = tracer.start_span(phase.name, context, start_time=_ns(phase.begins))
            child.end(_ns(phase.ends))
        root.end(_ns(recovery.ends))

    return trace


def _ns(seconds: float) -> int:
    return int(seconds * _NANO)
