"""Describes a job in plain sentences: its present activity, last event and next step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.job_model.lifecycle import DATA_WAIT, STOPPED_EARLY, Desired, State
from holdfast_service.job_model.program_levels import ProgramLevel
from holdfast_service.store.job_row_stats import HIGH_DATA_WAIT
from holdfast_service.store.json_safe import number
from holdfast_service.views.cause_words import cause_words
from holdfast_service.views.incident_facts import lost_clause
from holdfast_service.views.jobs import WaitingView
from holdfast_service.views.start_text import is_start, start_text
from holdfast_service.views.timeline import VerdictView
from holdfast_service.wording import device_share, plural

_MAIN_CAUSE = 0.8
"""A cause of more than this share of a wait is named alone."""


@dataclass(frozen=True)
class FaultCost:
    """A fault that stopped the job, which has outlived it."""

    steps_lost: int | None
    """None: not known."""
    lasted_s: float
    device_s: float = 0.0
    """Device-seconds that were lost to it."""


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
    waiting: WaitingView | None = None
    level: ProgramLevel = ProgramLevel.CONTEXT
    reads_steps: bool = True
    """Whether steps of the program could be known at its level and by its spec."""
    has_step: bool = True
    """Whether a step of the present attempt is known."""
    incidents: int = 0
    last: IncidentRecord | None = None
    slow_ranks: tuple[int, ...] = ()
    data_wait: float = 0.0
    """The share of the last steps in which a rank waited for data."""
    fetch_wait: float = 0.0
    """The share of the last steps in which a rank waited for a shard that its node had not yet."""
    reads_shards: bool = True
    """Whether it reads token sets, or else images, bytes or what its own code reads."""
    faults: tuple[FaultCost, ...] = ()
    """Of a job that has ended: what each of its faults cost."""
    saved_step: int | None = None
    saved_uri: str | None = None
    """Where the state of `saved_step` lies."""
    program_folder: str = ""
    """Where a program was started, for people."""
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
    """`0.2 s`, `45 s`, `12 min 14 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _headline_and_activity(job: JobStanding) -> tuple[str, str]:  # noqa: PLR0911  (one for each state)
    """The headline, and a sentence about the present activity."""
    place = f"step {job.step or 0:,}" + (f" of {job.steps:,}" if job.steps else "")
    at = f" at {place}" if _is_step_known(job) else ""
    reached = f" The job had reached {place}." if _is_step_known(job) else ""
    starts = _start(job)
    match job.state:
        case State.QUEUED:
            since = duration(max(0.0, job.now - job.created_at))
            why = f": {job.waiting.reason}" if job.waiting else ""
            return "Waiting in the queue", f"The job has been queued for {since}{why}."
        case State.STARTING:
            return "Starting", starts or _with_wait(job, "The job starts on the cluster.")
        case State.RUNNING if job.slow_ranks and not _lacks_data(job):
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
            doing = starts or _with_wait(job, f"The next attempt is prepared after {cause}.")
            return f"Recovering from {cause}", f"{doing}{reached}"
        case State.RESIZING:
            doing = starts or _with_wait(job, "The ranks are forming another mesh.")
            return "Resizing", f"{doing}{reached}"
        case State.PAUSING:
            return "Pausing", f"{_saves(job, at)} before the job leaves the cluster."
        case State.PAUSED:
            return "Paused", f"The job is paused{at} and holds no cluster resources."
        case State.CANCELLING:
            return "Cancelling", f"{_saves(job, at)} before the job ends."
        case State.CANCELLED:
            return "Cancelled", f"The job was cancelled{at}."
        case State.SUCCEEDED:
            took = (job.ended_at or job.now) - job.created_at
            return "Done", f"{_completed(job)}; the job took {duration(took)}."
        case State.FAILED:
            code = (job.outcome_code or "failed").replace("_", " ")
            return f"Failed: {code}", _sentence(job.outcome_message or f"The job failed{at}")


def _is_step_known(job: JobStanding) -> bool:
    """Whether any step of the job is known: a program may have reported none."""
    return job.step is not None or not _is_program(job)


def _is_program(job: JobStanding) -> bool:
    return job.level < ProgramLevel.CONTEXT


def _start(job: JobStanding) -> str:
    """The start of the present attempt; "" if that is not what the job waits for."""
    if job.waiting is None or not is_start(job.waiting):
        return ""
    return start_text(job.attempt, job.waiting, job.now)


def _saves(job: JobStanding, at: str) -> str:
    return (
        f"The program was asked to save and to end{at}"
        if _is_program(job)
        else f"Saving the state{at}"
    )


def _running(job: JobStanding, place: str) -> tuple[str, str]:
    if _start(job):
        return "Starting", _start(job)
    slowed = "Training, slowed by its data"
    if job.waiting is not None and _lacks_data(job):
        lasted = duration(max(0.0, job.now - job.waiting.since))
        return slowed, f"The job stands after {place}: {job.waiting.reason}, for {lasted} so far."
    if job.data_wait >= HIGH_DATA_WAIT:
        return slowed, f"Training at {place}. {_data_wait(job)}"
    if job.has_step or not _is_program(job):
        return "Training", _with_wait(job, f"Training at {place}.")
    if not job.reads_steps:
        return "Running", _with_wait(job, "The program runs; its steps are not read at this level.")
    return "Running", _with_wait(job, "The program runs; it has reported no step yet.")


def _lacks_data(job: JobStanding) -> bool:
    """Whether it stands in a step because a rank has no data."""
    return job.waiting is not None and job.waiting.resource == DATA_WAIT


def _data_wait(job: JobStanding) -> str:
    """How long the steps wait for data, why, and what helps."""
    share = f"{job.data_wait:.0%} of the time of the last steps was a wait for data"
    if not job.reads_shards:
        return (
            f"{share}: it is read, or decoded, more slowly than the steps use it. What helps: "
            "fewer ranks or more processors on a node."
        )
    fetching = job.fetch_wait / job.data_wait
    fetch = "a store with more bandwidth, or a larger HOLDFAST_CACHE_LIMIT_GB"
    reading = "fewer ranks or more processors on a node, or a faster disk for its cache"
    if fetching > _MAIN_CAUSE:
        return f"{share}: shards do not come fast enough from their store. What helps: {fetch}."
    if fetching < 1 - _MAIN_CAUSE:
        return f"{share}: the nodes have the shards, but read them slowly. What helps: {reading}."
    return (
        f"{share}: {fetching:.0%} of it for shards that come slowly from their store, the rest for "
        f"slow reading on the nodes. What helps: {fetch}; {reading}."
    )


def _completed(job: JobStanding) -> str:
    if job.step is None:
        return "The program has ended"
    if job.outcome_code == STOPPED_EARLY:
        return f"The job {job.outcome_message}"
    if job.steps and job.step >= job.steps:
        return f"All {job.steps:,} steps are complete"
    return f"The program has ended after step {job.step:,}"


def _with_wait(job: JobStanding, sentence: str) -> str:
    if job.waiting is None:
        return sentence
    until = ""
    if job.waiting.until is not None:
        until = f" (at most {duration(max(0.0, job.waiting.until - job.now))} more)"
    return f"{sentence} Waiting{until}: {job.waiting.reason}."


def _last_event(job: JobStanding) -> str | None:
    """A sentence about the last event, besides the present activity."""
    incident = job.last
    if job.state.terminal:
        return " ".join(filter(None, (_ending(job), _survived(job))))
    if incident is None:
        if job.started_at is None:
            return None
        started = duration(max(0.0, job.now - job.started_at))
        return f"The job started {started} ago; no faults so far."
    which = _which(job, incident)
    if incident.closed_at is None:
        decided = f"; decision: {incident.decision.replace('_', ' ')}" if incident.decision else ""
        ago = duration(max(0.0, job.now - (incident.opened_at or 0.0)))
        return f"{which} began {ago} ago and is still open{decided}."
    total_s = number(incident.phases_s.get("total"))
    took = f" in {duration(total_s)}" if total_s is not None else ""
    lost = f"; {clause}" if (clause := lost_clause(incident)) else ""
    ago = duration(max(0.0, job.now - incident.closed_at))
    if incident.end_code:
        return f"{which} was open when the job ended {ago} ago."
    return f"{which} was resolved {ago} ago{took}{lost}."


def _which(job: JobStanding, incident: IncidentRecord) -> str:
    """`Incident 3 of 4, a lost node,`"""
    several = f"Incident {incident.incident} of {job.incidents}" if job.incidents > 1 else ""
    return f"{several or 'The only incident'}, {cause_words(incident.cause).noun},"


def _ending(job: JobStanding) -> str:
    """The incident that was open at the end of the job; "" if none was."""
    incident = job.last
    if incident is None or not incident.end_code:
        return ""
    did = "ended the job" if job.state is State.FAILED else "was open when the job ended"
    return f"{_which(job, incident)} {did}."


def _survived(job: JobStanding) -> str:
    """`It survived 2 faults, which took 45 s in all until the job ran again (1.1 of 17.8
    device-hours); 12 steps were repeated.`"""
    if not job.faults:
        before = " before" if job.state is State.FAILED else ""
        return "" if _ending(job) else f"No fault interrupted it{before}."
    several = " in all" if len(job.faults) > 1 else ""
    took = duration(sum(fault.lasted_s for fault in job.faults))
    lost_s = sum(fault.device_s for fault in job.faults)
    share = f" ({device_share(lost_s, job.held_device_s)})" if lost_s else ""
    return (
        f"It survived {plural(len(job.faults), 'fault')}, which took {took}{several} until the job "
        f"ran again{share}; {_repeated(job)}."
    )


def _repeated(job: JobStanding) -> str:
    """`12 steps were repeated`."""
    lost = [fault.steps_lost for fault in job.faults]
    known = sum(each for each in lost if each is not None)
    if None in lost and not known:
        return "how many steps it repeated is not known" + (
            "" if job.reads_steps else " at this level"
        )
    more = " or more" if None in lost else ""
    count = plural(known, "step") if known else "no step"
    return f"{count}{more} {'was' if known < 2 and not more else 'were'} repeated"


def _result(job: JobStanding) -> str | None:
    """Where the result of an ended job lies."""
    if job.saved_step is not None:
        further = "" if job.state is State.SUCCEEDED else "; another job can start from it"
        return f"The state at step {job.saved_step:,} lies in {job.saved_uri}{further}."
    if _is_program(job):
        return (
            "The program's files lie where it wrote them; relative paths are in "
            f"{job.program_folder}."
        )
    return "No state of it is saved."


def _next_step(job: JobStanding) -> str | None:  # noqa: PLR0911  (one for each situation)
    if job.state.terminal:
        return _result(job)
    if job.desired is Desired.CANCELLED:
        return "The job ends once its last state is saved."
    if job.state is State.PAUSED:
        return "Nothing until a user resumes the job."
    if job.desired is Desired.PAUSED:
        return "The job leaves the cluster once its last state is saved."
    match job.state:
        case State.QUEUED:
            return "The job starts as soon as enough nodes are free."
        case State.STARTING if _is_program(job):
            return "The program runs once all ranks have joined."
        case State.STARTING:
            return "The first step."
        case State.RECOVERING:
            if _is_program(job):
                return (
                    "The program starts again on all ranks; which checkpoint it loads is its own."
                )
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
