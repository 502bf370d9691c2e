"""Describes a job in plain sentences: its present activity, last event and next step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.store.json_safe import number
from holdfast_service.views.cause_words import cause_words
from holdfast_service.views.timeline import VerdictView


@dataclass(frozen=True)
class JobStanding:
    """The inputs of a verdict. Times are Unix seconds."""

    state: State
    desired: Desired
    now: float
    created_at: float
    started_at: float | None
    ended_at: float | None
    step: int | None
    """None: a program has reported none."""
    steps: int | None
    attempt: int
    waiting_for: str | None = None
    waiting_until: float | None = None
    incidents: int = 0
    last: IncidentRecord | None = None
    slow_ranks: tuple[int, ...] = ()
    saved_step: int | None = None
    outcome_code: str | None = None
    outcome_message: str = ""
    eta_s: float | None = None
    goodput: float | None = None
    held_device_s: float = 0.0
    lost_device_s: float = 0.0
    reported_at: float | None = None


def verdict(job: JobStanding) -> VerdictView:
    headline, doing = _headline_and_activity(job)
    return VerdictView(
        headline=headline,
        doing=doing,
        last=_last_event(job),
        next=_next_step(job),
        eta_s=job.eta_s,
        goodput=job.goodput,
        device_hours_used=job.held_device_s / 3600,
        device_hours_lost=job.lost_device_s / 3600,
        fresh_at=_fresh_at(job),
    )


def duration(seconds: float) -> str:
    """`0.2 s`, `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _headline_and_activity(job: JobStanding) -> tuple[str, str]:  # noqa: PLR0911  (one for each state)
    """The headline, and a sentence about the present activity."""
    place = f"step {job.step or 0:,}" + (f" of {job.steps:,}" if job.steps else "")
    match job.state:
        case State.QUEUED:
            since = duration(max(0.0, job.now - job.created_at))
            why = f": {job.waiting_for}" if job.waiting_for else ""
            return "Waiting in the queue", f"The job has been queued for {since}{why}."
        case State.STARTING:
            return "Starting", _with_wait(job, "The nodes are starting and the ranks are joining.")
        case State.RUNNING if job.slow_ranks:
            slow = ", ".join(map(str, job.slow_ranks[:5]))
            rank = "Rank" if len(job.slow_ranks) == 1 else "Ranks"
            verb = "computes" if len(job.slow_ranks) == 1 else "compute"
            headline = "Training, slowed by a slow rank"
            return (
                headline,
                f"Training at {place}. {rank} {slow} {verb} more slowly than the others.",
            )
        case State.RUNNING:
            return _running(job, place)
        case State.RECOVERING:
            cause = cause_words(job.last.cause).noun if job.last else "a fault"
            sentence = f"Restoring the newest state after {cause}; the job had reached {place}."
            return f"Recovering from {cause}", _with_wait(job, sentence)
        case State.RESIZING:
            return "Resizing", f"The ranks are forming another mesh; the job had reached {place}."
        case State.PAUSING:
            return "Pausing", f"Saving the state at {place} before leaving the cluster."
        case State.PAUSED:
            return "Paused", f"The job is paused at {place} and holds no cluster resources."
        case State.CANCELLING:
            return "Cancelling", f"Saving the state at {place} before the job ends."
        case State.CANCELLED:
            return "Cancelled", f"The job was cancelled at {place}."
        case State.SUCCEEDED:
            took = (job.ended_at or job.now) - job.created_at
            return "Done", f"{_completed(job)}; the job took {duration(took)}."
        case State.FAILED:
            code = (job.outcome_code or "failed").replace("_", " ")
            return f"Failed: {code}", _sentence(job.outcome_message or f"The job failed at {place}")


def _running(job: JobStanding, place: str) -> tuple[str, str]:
    if job.step is None:
        return "Running", _with_wait(job, "The program runs; it has reported no step.")
    return "Training", _with_wait(job, f"Training at {place}.")


def _completed(job: JobStanding) -> str:
    if job.step is None:
        return "The program has ended"
    if job.steps and job.step >= job.steps:
        return f"All {job.steps:,} steps are complete"
    return f"The program has ended after step {job.step:,}"


def _with_wait(job: JobStanding, sentence: str) -> str:
    if job.waiting_for is None:
        return sentence
    until = ""
    if job.waiting_until is not None:
        until = f" (at most {duration(max(0.0, job.waiting_until - job.now))} more)"
    return f"{sentence} Waiting{until}: {job.waiting_for}."


def _last_event(job: JobStanding) -> str | None:
    """A sentence about the last event, besides the present activity."""
    incident = job.last
    if incident is None:
        if job.started_at is None:
            return None
        started = duration(max(0.0, job.now - job.started_at))
        return f"The job started {started} ago; no faults so far."
    which = (
        f"Incident {incident.incident} of {job.incidents}"
        if job.incidents > 1
        else "The only incident"
    )
    cause = cause_words(incident.cause).noun
    if incident.closed_at is None:
        decided = f"; decision: {incident.decision.replace('_', ' ')}" if incident.decision else ""
        ago = duration(max(0.0, job.now - (incident.opened_at or 0.0)))
        return f"{which}, {cause}, began {ago} ago and is still open{decided}."
    total_s = number(incident.phases_s.get("total"))
    took = f" in {duration(total_s)}" if total_s is not None else ""
    lost = {None: "", 0: "; no steps lost", 1: "; 1 step lost"}.get(
        incident.steps_lost, f"; {incident.steps_lost} steps lost"
    )
    ago = duration(max(0.0, job.now - incident.closed_at))
    return f"{which}, {cause}, was resolved {ago} ago{took}{lost}."


def _next_step(job: JobStanding) -> str | None:  # noqa: PLR0911  (one for each situation)
    if job.state.terminal:
        if job.state is State.SUCCEEDED or job.saved_step is None:
            return None
        return f"The state at step {job.saved_step:,} is saved; another job can start from it."
    if job.desired is Desired.CANCELLED:
        return "The job ends once its last state is saved."
    if job.state is State.PAUSED:
        return "Nothing until a user resumes the job."
    if job.desired is Desired.PAUSED:
        return "The job leaves the cluster once its last state is saved."
    match job.state:
        case State.QUEUED:
            return "The job starts as soon as enough nodes are free."
        case State.STARTING:
            return "The first step."
        case State.RECOVERING:
            return "The ranks form a new attempt and continue from the newest state that all have."
        case _ if job.eta_s is not None and job.steps:
            left = max(0, job.steps - (job.step or 0))
            return f"{left:,} steps left: about {duration(job.eta_s)} at this pace."
        case _:
            return None


def _fresh_at(job: JobStanding) -> float:
    if job.state.terminal and job.ended_at is not None:
        return job.ended_at
    if job.state.on_cluster and job.reported_at is not None:
        return job.reported_at
    return job.now


def _sentence(message: str) -> str:
    first = message.strip().splitlines()[0] if message.strip() else ""
    return first if first.endswith((".", "!", "?")) else f"{first}."
