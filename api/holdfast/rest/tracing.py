"""OpenTelemetry: one trace per request and one per incident, where an endpoint is named by
`OTEL_EXPORTER_OTLP_ENDPOINT` (or `..._TRACES_ENDPOINT`). Without one, nothing of it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import FastAPI

from holdfast_service.views.incident_trace import spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NOT_TRACED = "healthz,readyz,metrics"
_NANO = 1_000_000_000

_log = structlog.get_logger()


def provider() -> TracerProvider | None:
    """What sends spans away, in a thread of its own; None where nobody wants them."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = TracerProvider(resource=Resource.create({"service.name": "holdfast"}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def trace_requests(app: FastAPI, sender: TracerProvider) -> None:
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=sender, excluded_urls=NOT_TRACED, exclude_spans=["receive", "send"]
    )


def incident_tracer(sender: TracerProvider) -> Callable[[str, Mapping[str, Any]], None]:
    """To be called with each incident that has closed, once it is stored."""
    from opentelemetry.trace import set_span_in_context

    tracer = sender.get_tracer("holdfast")

    def trace(job_id: str, told: Mapping[str, Any]) -> None:
        try:
            whole, *phases = spans(job_id, told)
        except (TypeError, ValueError) as error:  # a supervisor of another version
            _log.warning("an incident cannot be traced", job=job_id, error=str(error))
            return
        root = tracer.start_span(
            whole.name, start_time=_ns(whole.begins), attributes=dict(whole.attributes)
        )
        inside = set_span_in_context(root)
        for phase in phases:
            below = tracer.start_span(phase.name, inside, start_time=_ns(phase.begins))
            below.end(_ns(phase.ends))
        root.end(_ns(whole.ends))

    return trace


def _ns(seconds: float) -> int:
    return int(seconds * _NANO)
