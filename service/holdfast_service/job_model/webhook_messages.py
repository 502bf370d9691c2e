"""The messages sent to a webhook: which events, their content, and their signature. Pure."""

from __future__ import annotations

import hashlib
import hmac
import html
import json
from collections.abc import Mapping
from typing import Any, Literal

from holdfast_service.job_model.events.codec import AnyEvent, encode
from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentOpenedEvent
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import JobStateEvent
from holdfast_service.job_model.lifecycle import TERMINAL
from holdfast_service.job_model.times import rfc3339

WebhookFormat = Literal["json", "slack"]
_MARKS = {"SUCCEEDED": ":white_check_mark:", "FAILED": ":x:", "CANCELLED": ":no_entry_sign:"}


def is_sent(event: AnyEvent) -> bool:
    """Whether the event is sent: incidents as they open and close, and ends of jobs."""
    if isinstance(event, JobStateEvent):
        return event.new in TERMINAL
    return isinstance(event, IncidentOpenedEvent | IncidentClosedEvent)


def message(job_id: str, name: str, seq: int, at: float, event: AnyEvent) -> dict[str, Any]:
    """The content of the message, in no format yet: it is stored now and sent later."""
    kept = ("incident", "cause", "decision", "reason", "steps_lost", "phases_s", "from", "to")
    data = encode(event)
    return {
        "id": f"{job_id}:{seq}",
        "kind": event.kind,
        "at": at,
        "job": {"id": job_id, "name": name},
        **{key: data[key] for key in kept if data.get(key) is not None},
    }


def body(content: Mapping[str, Any], message_format: WebhookFormat) -> bytes:
    if message_format == "slack":
        # Slack takes `<!channel>` in a user's error for a call to everybody.
        payload = {"text": html.escape(describe(content), quote=False)}
    else:
        payload = {**content, "at": rfc3339(content["at"])}
    return json.dumps(payload, separators=(",", ":"), default=str).encode()


def describe(content: Mapping[str, Any]) -> str:
    """One line of text for people."""
    job, kind = content["job"]["name"], content["kind"]
    if kind == EventKind.JOB_STATE:
        state = str(content.get("to"))
        why = f": {content['reason']}" if content.get("reason") and state != "SUCCEEDED" else ""
        return f"{_MARKS.get(state, '')} *{job}* {state}{why}".strip()
    number, cause = content.get("incident"), content.get("cause")
    if kind == EventKind.INCIDENT_OPENED:
        return f":warning: *{job}* incident {number}: {cause}"
    total_s = (content.get("phases_s") or {}).get("total")
    took = f" in {total_s:.1f} s" if isinstance(total_s, int | float) else ""
    lost = f", {content['steps_lost']} steps lost" if content.get("steps_lost") else ""
    return f":anchor: *{job}* incident {number} is over{took}: {content.get('decision')}{lost}"


def signature(secret: bytes, payload: bytes, at: int) -> str:
    """`t=<Unix seconds>,v1=<hex>`: HMAC-SHA256 of "<t>." and the body. A receiver should refuse a
    message that is old or does not match."""
    signed = hmac.new(secret, f"{at}.".encode() + payload, hashlib.sha256).hexdigest()
    return f"t={at},v1={signed}"
