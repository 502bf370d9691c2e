"""The messages sent to a webhook: which events, their content, and their signature. Pure.

The content is stored with its event. What sums up an ended job is added when the message is sent:
the account of the job is complete only once all that its end stores is stored.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast_service.job_model.events.codec import AnyEvent, encode
from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentOpenedEvent
from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.job_model.events.progress import JobStateEvent
from holdfast_service.job_model.lifecycle import TERMINAL, State
from holdfast_service.job_model.times import rfc3339
from holdfast_service.views.event_text import event_text

WebhookFormat = Literal["json", "slack"]
_MARKS = {
    EventKind.INCIDENT_OPENED: ":warning:",
    EventKind.INCIDENT_CLOSED: ":anchor:",
    State.SUCCEEDED: ":white_check_mark:",
    State.FAILED: ":x:",
    State.CANCELLED: ":no_entry_sign:",
}
"""The marks in Slack, by the kind of the event or the state that the job ended in."""


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
        "text": event_text(event.kind, data),
        "job": {"id": job_id, "name": name},
        **{key: data[key] for key in kept if data.get(key) is not None},
        **({"end_code": data["end_code"]} if data.get("end_code") else {}),
    }


def is_end_of_job(content: Mapping[str, Any]) -> bool:
    """Whether the message reports the end of its job."""
    return bool(content["kind"] == EventKind.JOB_STATE)


def body(
    content: Mapping[str, Any], message_format: WebhookFormat, summary: Sequence[str] | None = None
) -> bytes:
    """`summary`: of the job, if the message reports its end; see `VerdictView.lines`."""
    if message_format == "slack":
        of = EventKind.INCIDENT_OPENED if content.get("end_code") else content["kind"]
        mark = _MARKS[content.get("to", of)]  # an incident that ended the job was not resolved
        line = f"{mark} *{content['job']['name']}*: {content['text']}"
        # Slack takes `<!channel>` in a user's error for a call to everybody.
        payload: dict[str, Any] = {
            "text": html.escape("\n".join((line, *(summary or ()))), quote=False)
        }
    else:
        payload = {**content, "at": rfc3339(content["at"])}
        if summary is not None:
            payload["summary"] = list(summary)
    return json.dumps(payload, separators=(",", ":"), default=str).encode()


def signature(secret: bytes, payload: bytes, at: int) -> str:
    """`t=<Unix seconds>,v1=<hex>`: HMAC-SHA256 of "<t>." and the body. A receiver should refuse a
    message that is old or does not match."""
    signed = hmac.new(secret, f"{at}.".encode() + payload, hashlib.sha256).hexdigest()
    return f"t={at},v1={signed}"
