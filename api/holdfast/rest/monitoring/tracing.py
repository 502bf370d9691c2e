"""OpenTelemetry: a trace per request and per incident, if `OTEL_EXPORTER_OTLP_ENDPOINT` (or
`..._TRACES_ENDPOINT`) names an endpoint. Without an endpoint no OpenTelemetry module is loaded.
The trace of an incident has a span for the incident, and a child span per phase.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from fastapi import FastAPI

from holdfast.rest.http import request_ids
from holdfast_service.job_model.events.incidents import IncidentRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ATTRIBUTES = ("incident", "attempt", "next_attempt", "cause", "decision", "steps_lost")
NOT_TRACED = "healthz,readyz,metrics"
_NANO = 1_000_000_000
_log = structlog.get_logger()
PHASES = ("detect", "gather", "fence", "decide", "wait", "form", "restore", "first_step")
"""Phases in the order of a recovery; other phases of an incident come last."""


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
    """A function to call with each closed incident after it is stored; it exports a trace, unless a
    time is not finite."""
    from opentelemetry.trace import set_span_in_context

    tracer = sender.get_tracer("holdfast")

    def trace(job_id: str, incident: IncidentRecord) -> None:
        ends = incident.closed_at or incident.opened_at or 0.0
        begins = at = incident.signalled_at or incident.opened_at or ends
        phases = _ordered_phases(incident)
        if not all(map(math.isfinite, (begins, ends, *phases.values()))):
            _log.warning("cannot trace an incident", job=job_id, incident=incident.incident)
            return
        root = tracer.start_span(
            f"incident {incident.cause}",
            start_time=_ns(begins),
            attributes=_attributes(job_id, incident),
        )
        context = set_span_in_context(root)
        for phase, taken_s in phases.items():
            child = tracer.start_span(phase, context, start_time=_ns(at))
            at += taken_s
            child.end(_ns(at))
        root.end(_ns(ends))

    return trace


def _ordered_phases(incident: IncidentRecord) -> dict[str, float]:
    """Phase → its seconds, in the order of a recovery."""
    taken_s = incident.phases_s
    names = (*(name for name in PHASES if name in taken_s), *taken_s)
    return {name: taken_s[name] for name in names if name != "total"}


def _attributes(job_id: str, incident: IncidentRecord) -> dict[str, str | int | float]:
    values = {name: getattr(incident, name) for name in _ATTRIBUTES}
    known = {f"holdfast.{name}": value for name, value in values.items() if value is not None}
    return {"holdfast.job": job_id, **known}


def _ns(seconds: float) -> int:
    return int(seconds * _NANO)
