"""What a webhook is told of, in which words, and how it is signed. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Literal

from holdfast_service.job_model.lifecycle import TERMINAL, State

Format = Literal["json", "slack"]
INCIDENTS = ("incident.opened", "incident.closed")
_MARKS = {"SUCCEEDED": ":white_check_mark:", "FAILED": ":x:", "CANCELLED": ":no_entry_sign:"}


def is_told(kind: str, data: Mapping[str, Any]) -> bool:
    """Incidents as they open and close, and ends of jobs."""
    if kind == "job.state":
        return State(str(data.get("to"))) in TERMINAL
    return kind in INCIDENTS


def message(
    job_id: str, name: str, seq: int, at: float, kind: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """The same whatever the format: it is stored before anybody knows when it is sent."""
    kept = ("incident", "cause", "decision", "reason", "steps_lost", "phases_s", "from", "to")
    return {
        "id": f"{job_id}:{seq}",
        "kind": kind,
        "at": at,
        "job": {"id": job_id, "name": name},
        **{key: data[key] for key in kept if data.get(key) is not None},
    }


def body(told: Mapping[str, Any], form: Format) -> bytes:
    content = {"text": in_words(told)} if form == "slack" else dict(told)
    return json.dumps(content, separators=(",", ":"), default=str).encode()


def in_words(told: Mapping[str, Any]) -> str:
    """One line, for people."""
    job, kind = told["job"]["name"], told["kind"]
    if kind == "job.state":
        state = str(told.get("to"))
        why = f": {told['reason']}" if told.get("reason") and state != "SUCCEEDED" else ""
        return f"{_MARKS.get(state, '')} *{job}* {state}{why}".strip()
    number, cause = told.get("incident"), told.get("cause")
    if kind == "incident.opened":
        return f":warning: *{job}* incident {number}: {cause}"
    total_s = (told.get("phases_s") or {}).get("total")
    took = f" in {total_s:.1f} s" if isinstance(total_s, int | float) else ""
    lost = f", {told['steps_lost']} steps lost" if told.get("steps_lost") else ""
    return f":anchor: *{job}* incident {number} is over{took}: {told.get('decision')}{lost}"


def signature(secret: bytes, sent: bytes, at: int) -> str:
    """`t=<Unix seconds>,v1=<hex>`: HMAC-SHA256 of "<t>." and the body; a receiver refuses what is
    old, and what does not match."""
    signed = hmac.new(secret, f"{at}.".encode() + sent, hashlib.sha256).hexdigest()
    return f"t={at},v1={signed}"
