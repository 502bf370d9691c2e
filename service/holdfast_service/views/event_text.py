"""The sentence of each event of a job, for the command line, the dashboard and webhooks. Pure.

Promises: an event of every kind has a sentence, also of a kind that this version does not know and
with fields that are missing, empty or of another type; the sentence is one line; long values are
cut (the event's data have them whole). No sentence has a time of day: `event_until` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast_service.job_model.events.kinds import EventKind
from holdfast_service.views.cause_words import cause_words
from holdfast_service.wording import duration, mesh_text, plural, ranks_text, sentence
from holdfast_workers.byte_sizes import size_of

SENTENCES: Mapping[str, str] = {
    EventKind.JOB_SUBMITTED: "the job was submitted[ as {name}]",
    EventKind.JOB_STATE: "the state changed[ from {from}][ to {to}][: {reason}]",
    EventKind.CANCEL_REQUESTED: "a user requested the cancellation of the job",
    EventKind.PAUSE_REQUESTED: "a user requested a pause of the job",
    EventKind.RESTART_REQUESTED: "a user requested new processes for the job",
    EventKind.RESIZE_REQUESTED: "a user ordered "
    "[at most {nodes}|as many nodes as the job may have]",
    EventKind.RESUME_REQUESTED: "a user requested that the job continues",
    EventKind.JOB_RELEASED: "all resources of the job were released",
    EventKind.INITIALISED_FROM: "attempt {attempt} was initialised from {what} of {uri}"
    "[ at step {step}]",
    EventKind.JOB_STOPPING: "the job saves its state[ after step {step}] and stops"
    "[, to {wanted}][: {reason}]",
    EventKind.STOP_UNDONE: "training continues after step {step}: the request to {wanted} was "
    "given up[, because {reason}]",
    EventKind.ENDS_EARLY: "training stops early, after step {step}[: {reason}]",
    EventKind.PACKAGES_INSTALLED: "{host} installed the job's packages[ in {took_s} s]",
    EventKind.DATA_PREPARED: "the job's data are {tokens} tokens of {documents} documents"
    "[ and {validation_tokens} for validation][, prepared in {took_s} s]"
    "[; left out: {bad_count}, the first: {bad}]",
    EventKind.MODEL_PREPARED: "the weights of {folder} were read, {nbytes} of the family {family}"
    "[ in {took_s} s][; the digest of their manifest is {digest}]",
    EventKind.SUPERVISOR_STARTED: "the supervisor was started[ (start {times})]",
    EventKind.JOB_AWAY: "nothing of the job ran for {away_s}[: it was {why}]",
    EventKind.PHASE: "the supervisor entered the phase {phase}",
    EventKind.ATTEMPT_FORMING: "attempt {attempt} is forming[ with {world_size}]"
    "[ on the mesh {mesh}]",
    EventKind.ATTEMPT_RUNNING: "attempt {attempt} is running[, and its first step is {first_step}]",
    EventKind.ATTEMPT_ENDED: "attempt {attempt} ended[, the last step known by then is {last_step}]"
    "[: {reason}]",
    EventKind.INCIDENT_OPENED: "incident {incident} was opened, because {cause}[: {evidence}]",
    EventKind.INCIDENT_UPDATED: "incident {incident} was updated"
    "[ with the decision to {decision}|: {cause}]",
    EventKind.INCIDENT_CLOSED: "incident {incident} was closed[ after {phases_s}][: {resolution}]"
    "[; the decision was to {decision}][; {steps_lost} lost]",
    EventKind.CHECKPOINT_SAVED: "the checkpoint of step {step} was saved[ in the {tier} tier]"
    "[, {nbytes}]",
    EventKind.CHECKPOINT_DELETED: "the checkpoint of step {step} was deleted[: {why}]",
    EventKind.CHECKPOINT_BAD: "the checkpoint of step {step} is bad[: {message}]",
    EventKind.CHECKPOINT_VERIFIED: "the checkpoint of step {step} was verified",
    EventKind.CHECKPOINT_PINNED: "the checkpoint of step {step} was pinned",
    EventKind.CHECKPOINT_UNPINNED: "the checkpoint of step {step} was unpinned",
    EventKind.CHECKPOINT_INTERVAL: "the {tier} tier is saved every {every_steps}[: {why}]",
    EventKind.PROGRAM_RESUMED: "the first step seen of attempt {attempt} is {first_step}"
    "[, {steps_lost} lost]",
    EventKind.MEMORY_PLACED: "the memory checkpoints of attempt {attempt} were placed"
    "[, copies on other nodes: {copies}]",
    EventKind.PROGRAM_ATTACHED: "the program of attempt {attempt} attached[ through {integration}] "
    "at level {level}",
    EventKind.DIGEST_MISMATCH: "the digest of step {step} in attempt {attempt} differs from the "
    "stored one",
    EventKind.STALLED: "attempt {attempt} has stalled[ at step {step}][: {reason}]",
    EventKind.STRAGGLER: "rank {rank}[ on agent {agent}] is {state}[, at {factor} times the time "
    "of its peers][: {why}]",
    EventKind.GUARD_TRIPPED: "a guard found {kind} at step {step}"
    "[, and the decision is to {decision}][: {why}]",
    EventKind.WAITING: "the job waits for {resource}[: {reason}]",
    EventKind.RELEASE_OVERDUE: "the release of {resource} is overdue[: {reason}]",
    EventKind.STANDBY: "the standby agent {agent} is {state}",
    EventKind.NODE_HEALTH: "the health of node {node_id}[ (agent {agent})] was checked"
    "[: {findings}]",
    EventKind.NODE_DRAINING: "the cluster is about to remove node {node_id}[ ({host})]"
    "[ with {ranks}]",
    EventKind.NODE_QUARANTINED: "node {node} was quarantined[: {reason}]",
    EventKind.FAULT_INJECTED: "fault {number} was injected[: {kind}][ on rank {rank}]",
    EventKind.FAULT_FAILED: "a fault could not be injected[ on agent {agent}][: {why}]",
    EventKind.EVENT_UNREADABLE: "an event of kind {kind} could not be read[: {error}]",
    EventKind.EVENTS_LOST: "the events between {after} and {before} were lost",
    EventKind.ROWS_LOST: "the metrics and digests of the steps between {after} and {before} were "
    "lost",
    EventKind.ENDED: "the supervisor ended the job as {outcome}[ after step {step}][: {message}]",
}
"""Kind -> its sentence. If a field of `[...]` is missing, the part after its `|` stands instead, or
nothing."""
LONGEST_VALUE = 100
UNKNOWN = "?"

_OPTIONAL = re.compile(r"\[([^\]|]*)\|?([^\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")
_TIME = re.compile(r"_at$|^until$|^deadline$")


def event_text(kind: str, data: Mapping[str, Any]) -> str:
    """`Attempt 2 is forming with 4 ranks on the mesh dp_shard 2 × tp 2.`"""
    template = SENTENCES.get(kind)
    if template is None:
        return _fields_sentence(data)
    values = {name: text for name in _FIELD.findall(template) if (text := _value(name, data))}

    def optional(section: re.Match[str]) -> str:
        complete = all(name in values for name in _FIELD.findall(section[1]))
        return section[1] if complete else section[2]

    chosen = _OPTIONAL.sub(optional, template)
    return sentence(_FIELD.sub(lambda field: values.get(field[1], UNKNOWN), chosen))


def event_until(kind: str, data: Mapping[str, Any]) -> float | None:
    """When what the event reports ends at the latest; None: not known."""
    if kind not in SENTENCES:
        return None  # its fields may mean anything
    times = (data.get("until"), data.get("deadline"))
    return next((float(at) for at in times if isinstance(at, int | float)), None)


def _fields_sentence(data: Mapping[str, Any]) -> str:
    """`The event reports agent n1, parts (3 items).` Empty for an event without fields."""
    values = [
        f"{name.replace('_', ' ')} {text}"
        for name in data
        if not _TIME.search(name) and (text := _value(name, data))
    ]
    return sentence(f"the event reports {', '.join(values)}") if values else ""


def _value(name: str, data: Mapping[str, Any]) -> str:
    """The value as text; empty if there is none, and for False."""
    value = data.get(name)
    if value in (None, "", [], {}) or value is False:
        return ""
    if (form := _FORMATS.get(name)) is not None:
        try:
            return _cut(form(value))
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
            pass  # another value than this version knows: shown as any other
    if isinstance(value, list | dict):
        return f"({plural(len(value), 'item')})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "true" if value is True else _cut(str(value))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_VALUE else f"{line[:LONGEST_VALUE]}…"


def _findings(findings: list[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{finding['level']} ({finding['probe']}), {finding['what']}" for finding in findings
    )


def _words(name: str) -> str:
    """`not finite`. The kind of an event stays as it is: `job.resize_requested`."""
    return name if "." in name else name.replace("_", " ")


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "away_s": lambda seconds: duration(float(seconds)),
    "bad": lambda texts: str(texts[0]),
    "bad_count": lambda count: plural(int(count), "record") if count else "",
    "cause": lambda cause: cause_words(str(cause)).clause,
    "decision": _words,
    "every_steps": lambda steps: plural(int(steps), "step"),
    "documents": lambda count: f"{count:,}",
    "evidence": lambda texts: str(texts[0]),
    "findings": _findings,
    "kind": _words,
    "mesh": mesh_text,
    "nbytes": size_of,
    "nodes": lambda nodes: plural(int(nodes), "node"),
    "phases_s": lambda phases: duration(phases["total"]) if "total" in phases else "",
    "ranks": ranks_text,
    "steps_lost": lambda steps: plural(int(steps), "step"),
    "tokens": lambda count: f"{count:,}",
    "world_size": lambda ranks: plural(int(ranks), "rank"),
}
