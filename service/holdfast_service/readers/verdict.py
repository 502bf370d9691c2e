"""How a job stands, in plain words: what it does, what happened last, what comes next. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.job_model.lifecycle import Desired, State
from holdfast_service.policy.causes import Cause
from holdfast_service.views.timeline import VerdictView


@dataclass(frozen=True)
class LastIncident:
    """The newest fault of a job."""

    number: int
    cause: str
    closed_at: float | None
    opened_at: float
    decision: str | None
    steps_lost: int | None
    total_s: float | None


@dataclass(frozen=True)
class Standing:
    """All that a verdict is made of. Times are Unix seconds; `devices`: that the job runs on."""

    state: State
    desired: Desired
    now: float
    created_at: float
    started_at: float | None
    ended_at: float | None
    step: int
    steps: int
    attempt: int
    devices: int
    waiting_for: str | None = None
    waiting_until: float | None = None
    incidents: int = 0
    last: LastIncident | None = None
    slow_ranks: tuple[int, ...] = ()
    saved_step: int | None = None
    outcome_code: str | None = None
    outcome_message: str = ""
    eta_s: float | None = None
    goodput: float | None = None
    held_s: float = 0.0
    lost_s: float = 0.0
    told_at: float | None = None


def verdict(job: Standing) -> VerdictView:
    headline, doing = _now(job)
    return VerdictView(
        headline=headline,
        doing=doing,
        last=_last(job),
        next=_next(job),
        eta_s=job.eta_s,
        goodput=job.goodput,
        device_hours_used=job.held_s * job.devices / 3600,
        device_hours_lost=job.lost_s * job.devices / 3600,
        fresh_at=_fresh_at(job),
    )


def cause_in_words(cause: str) -> str:
    """`node_lost` -> `a lost node`; a cause that is not known is told as it is."""
    return _CAUSES.get(cause, cause.replace("_", " "))


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


_CAUSES: dict[str, str] = {
    Cause.NODE_LOST: "a lost node",
    Cause.PREEMPTED: "a node that is taken away",
    Cause.NODE_UNWELL: "an unwell node",
    Cause.AGENT_LOST: "a lost node agent",
    Cause.OUT_OF_MEMORY: "a process killed for want of memory",
    Cause.WORKER_CRASH: "a worker that died",
    Cause.CORRUPTION: "state that differs between replicas",
    Cause.HANG: "a hang",
    Cause.USER_ERROR: "an error of the training program",
    Cause.BAD_STATE: "a saved state that could not be loaded",
    Cause.NOT_FINITE: "a first step that was not finite",
    Cause.GUARD: "a loss or gradient out of bounds",
    Cause.CHECKPOINT_FAILED: "a checkpoint that could not be written",
    Cause.INTERNAL_ERROR: "an internal error",
    Cause.NO_PROGRESS: "an attempt that did not come up in time",
    Cause.STRAGGLER: "a rank that computes too slowly",
    Cause.RESTORE_UNAVAILABLE: "a remote tier that did not answer",
    Cause.REMOTE_UNAVAILABLE: "a remote tier that takes no checkpoint",
    Cause.COMMUNICATION: "broken communication",
}


def _now(job: Standing) -> tuple[str, str]:  # noqa: PLR0911  (one for each state)
    """A headline, and what it does now."""
    place = f"step {job.step:,} of {job.steps:,}"
    match job.state:
        case State.QUEUED:
            since = duration(max(0.0, job.now - job.created_at))
            why = f": {job.waiting_for}" if job.waiting_for else ""
            return "Waiting in the queue", f"It waits to start, since {since}{why}."
        case State.STARTING:
            return "Starting", _with_wait(job, "Its nodes are brought up and its ranks join.")
        case State.RUNNING if job.slow_ranks:
            slow = ", ".join(map(str, job.slow_ranks[:5]))
            rank = "Rank" if len(job.slow_ranks) == 1 else "Ranks"
            verb = "computes" if len(job.slow_ranks) == 1 else "compute"
            headline = "Training, held up by a slow rank"
            return (
                headline,
                f"It trains, {place}. {rank} {slow} {verb} more slowly than the others.",
            )
        case State.RUNNING:
            return "Training", _with_wait(job, f"It trains, {place}.")
        case State.RECOVERING:
            cause = cause_in_words(job.last.cause) if job.last else "a fault"
            words = f"It goes back to its newest state after {cause}; it had come to {place}."
            return f"Recovering from {cause}", _with_wait(job, words)
        case State.RESIZING:
            return "Changing its size", f"Its ranks form another mesh; it had come to {place}."
        case State.PAUSING:
            return "Pausing", f"It saves its state at {place} and leaves the cluster."
        case State.PAUSED:
            return "Paused", f"It stands at {place} and holds nothing on the cluster."
        case State.CANCELLING:
            return "Being cancelled", f"It saves its state at {place} and ends."
        case State.CANCELLED:
            return "Cancelled", f"It was cancelled at {place}."
        case State.SUCCEEDED:
            took = (job.ended_at or job.now) - job.created_at
            return "Done", f"All {job.steps:,} steps are made; it took {duration(took)}."
        case State.FAILED:
            code = (job.outcome_code or "failed").replace("_", " ")
            return f"Failed: {code}", _sentence(job.outcome_message or f"It failed at {place}")


def _with_wait(job: Standing, words: str) -> str:
    if job.waiting_for is None:
        return words
    until = ""
    if job.waiting_until is not None:
        until = f", for {duration(max(0.0, job.waiting_until - job.now))} more at most"
    return f"{words} It waits{until}: {job.waiting_for}."


def _last(job: Standing) -> str | None:
    """What happened last, beside what it does now."""
    one = job.last
    if one is None:
        if job.started_at is None:
            return None
        return f"It started {duration(max(0.0, job.now - job.started_at))} ago; no fault so far."
    number = (
        f"Incident {one.number} of {job.incidents}" if job.incidents > 1 else "Its one incident"
    )
    cause = cause_in_words(one.cause)
    if one.closed_at is None:
        decided = f"; decided: {one.decision.replace('_', ' ')}" if one.decision else ""
        ago = duration(max(0.0, job.now - one.opened_at))
        return f"{number}, {cause}, began {ago} ago and is open{decided}."
    took = f" in {duration(one.total_s)}" if one.total_s is not None else ""
    lost = {None: "", 0: ", no step lost", 1: ", 1 step lost"}.get(
        one.steps_lost, f", {one.steps_lost} steps lost"
    )
    ago = duration(max(0.0, job.now - one.closed_at))
    return f"{number}, {cause}, was over{took}{lost}, {ago} ago."


def _next(job: Standing) -> str | None:  # noqa: PLR0911  (one for each standing)
    if job.state.terminal:
        if job.state is State.SUCCEEDED or job.saved_step is None:
            return None
        return f"Its state at step {job.saved_step:,} is kept: another job can begin with it."
    if job.desired is Desired.CANCELLED:
        return "It ends once its last state is saved."
    if job.state is State.PAUSED:
        return "Nothing, until somebody resumes it."
    if job.desired is Desired.PAUSED:
        return "It leaves the cluster once its last state is saved."
    match job.state:
        case State.QUEUED:
            return "It starts as soon as nodes are free for it."
        case State.STARTING:
            return "The first step."
        case State.RECOVERING:
            return "Its ranks form a new attempt and go on from the newest state all of them have."
        case _ if job.eta_s is not None:
            left = max(0, job.steps - job.step)
            return f"{left:,} steps to go: about {duration(job.eta_s)} at this pace."
        case _:
            return None


def _fresh_at(job: Standing) -> float:
    if job.state.terminal and job.ended_at is not None:
        return job.ended_at
    if job.state.on_cluster and job.told_at is not None:
        return job.told_at
    return job.now


def _sentence(words: str) -> str:
    first = words.strip().splitlines()[0] if words.strip() else ""
    return first if first.endswith((".", "!", "?")) else f"{first}."
