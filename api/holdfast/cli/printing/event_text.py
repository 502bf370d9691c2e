"""A sentence for each event of a job. Pure: neither I/O nor a clock.

Promises: an event of every kind renders, also of a kind that this version does not know and with
fields that are missing, empty or of another type; the result is one line; long values are cut
(`-o json` has them whole).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.cli.printing import output
from holdfast.cli.printing.incident_text import cause_sentence, ranks_text, sentence
from holdfast_service.job_model.times import unix_seconds

SENTENCES = {
    "job.submitted": "the job was submitted[ as {name}]",
    "job.state": "the state changed[ from {from}][ to {to}][: {reason}]",
    "job.cancel_requested": "a user requested to cancel the job",
    "job.pause_requested": "a user requested to pause the job",
    "job.restart_requested": "a user requested new processes for the job",
    "job.resize_requested": "a user ordered the size of the job",
    "job.resume_requested": "a user requested to resume the job",
    "job.released": "all resources of the job were released",
    "job.initialised_from": "attempt {attempt} was initialised from {what} of {uri}"
    "[ at step {step}]",
    "job.stopping": "the job is stopping after step {step}[, to {wanted}][: {reason}]",
    "job.stop_undone": "training continues after step {step}: the request to {wanted} was given "
    "up[, because {reason}]",
    "packages.installed": "{host} installed the job's packages[ in {took_s} s]",
    "supervisor.started": "the supervisor was started[ (start {times})]",
    "phase": "the supervisor entered the phase {phase}",
    "attempt.forming": "attempt {attempt} is forming[ with {world_size} ranks]"
    "[ on the mesh {mesh}]",
    "attempt.running": "attempt {attempt} is running[, and its first step is {first_step}]",
    "attempt.ended": "attempt {attempt} ended[ after step {last_step}][: {reason}]",
    "incident.opened": "incident {incident} was opened, because {cause}[: {evidence}]",
    "incident.updated": "incident {incident} was updated[ with the decision to {decision}]",
    "incident.closed": "incident {incident} was closed[: {resolution}]",
    "checkpoint.saved": "the checkpoint of step {step} was saved[ in the {tier} tier][, {nbytes}]",
    "checkpoint.deleted": "the checkpoint of step {step} was deleted[: {why}]",
    "checkpoint.bad": "the checkpoint of step {step} is bad[: {message}]",
    "checkpoint.verified": "the checkpoint of step {step} was verified",
    "checkpoint.pinned": "the checkpoint of step {step} was pinned",
    "checkpoint.unpinned": "the checkpoint of step {step} was unpinned",
    "checkpoint.interval": "the {tier} tier is saved every {every_steps} steps[: {why}]",
    "program.resumed": "the program of attempt {attempt} goes on from its own checkpoint of step "
    "{restored_step}[, {steps_lost} steps lost]",
    "memory.placed": "the memory checkpoints of attempt {attempt} were placed[, copies: {copies}]",
    "program.attached": "the program of attempt {attempt} attached[ through {integration}] "
    "at level {level}",
    "digest.mismatch": "the digest of step {step} in attempt {attempt} differs from the stored one",
    "stalled": "attempt {attempt} has stalled[ at step {step}][: {reason}]",
    "straggler": "rank {rank}[ on agent {agent}] is {state}[, at {factor} times the time of its "
    "peers][: {why}]",
    "guard.tripped": "a guard found {kind} at step {step}[, and the decision is to {decision}]"
    "[: {why}]",
    "waiting": "the job waits for {resource}[: {reason}][ (until {until})]",
    "release.overdue": "the release of {resource} is overdue[: {reason}]",
    "standby": "the standby agent {agent} is {state}",
    "node.health": "the health of node {node_id}[ (agent {agent})] was checked[: {findings}]",
    "node.draining": "the cluster is about to remove node {node_id}[ of {ranks}]"
    "[ (until {deadline})]",
    "node.quarantined": "node {node} was quarantined[ until {until}][: {reason}]",
    "fault.injected": "fault {number} was injected[: {kind}][ on rank {rank}]",
    "fault.failed": "an injected fault failed[ on agent {agent}][: {why}]",
    "event.unreadable": "an event of kind {kind} could not be read[: {error}]",
    "events.lost": "the events between {after} and {before} were lost",
    "rows.lost": "the metrics and digests of the steps between {after} and {before} were lost",
    "ended": "the supervisor ended the job as {outcome}[ after step {step}][: {message}]",
}
"""Kind -> its sentence; `[...]` is left out if one of its fields is missing."""
LONGEST_VALUE = 100
UNKNOWN = "?"

_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")


def event_sentence(kind: str, data: Mapping[str, Any]) -> str:
    """`Attempt 2 is forming with 4 ranks on the mesh dp_shard 2 × tp 2.`"""
    template = SENTENCES.get(kind)
    if template is None:
        return _fields_sentence(data)
    values = {name: text for name in _FIELD.findall(template) if (text := _value(name, data))}

    def optional(section: re.Match[str]) -> str:
        complete = all(name in values for name in _FIELD.findall(section[1]))
        return section[1] if complete else ""

    chosen = _OPTIONAL.sub(optional, template)
    return sentence(_FIELD.sub(lambda field: values.get(field[1], UNKNOWN), chosen))


def _fields_sentence(data: Mapping[str, Any]) -> str:
    """`The event reports agent n1, parts (3 items).` Empty for an event without fields."""
    values = [f"{name.replace('_', ' ')} {text}" for name in data if (text := _value(name, data))]
    return sentence(f"the event reports {', '.join(values)}") if values else ""


def _value(name: str, data: Mapping[str, Any]) -> str:
    """The value as text; empty if there is none, and for False."""
    value = data.get(name)
    if value in (None, "", [], {}) or value is False:
        return ""
    if (form := _FORMATS.get(name)) is not None:
        try:
            return _cut(form(value))
        except (TypeError, ValueError, KeyError, AttributeError):
            pass  # another type than this version knows: shown as any other value
    if isinstance(value, list | dict):
        return f"({output.plural(len(value), 'item')})"
    if isinstance(value, float):
        return f"{value:.4g}"
    if name.endswith("_at"):
        with contextlib.suppress(TypeError, ValueError):
            return output.clock(unix_seconds(value))
    return "true" if value is True else _cut(str(value))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_VALUE else f"{line[:LONGEST_VALUE]}…"


def _mesh(axes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in axes.items())


def _findings(findings: list[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{finding['level']} ({finding['probe']}), {finding['what']}" for finding in findings
    )


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "cause": lambda cause: cause_sentence(str(cause)),
    "evidence": lambda texts: str(texts[0]),
    "findings": _findings,
    "mesh": _mesh,
    "nbytes": lambda count: f"{count:,} bytes",
    "ranks": ranks_text,
    "until": output.clock,
    "deadline": output.clock,
}
