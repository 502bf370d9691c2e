"""From the first sign of a fault to the verdict: open the incident, gather its siblings, judge."""

from __future__ import annotations

from dataclasses import replace

from holdfast_service.incidents import Incident
from holdfast_service.policy import Cause, Fault, GiveUp, judge, primary, within_window
from holdfast_service.recovery import ending
from holdfast_service.recovery.state import WITH_WORLD, Stage, State
from holdfast_service.registry import BadCopy
from holdfast_service.reports import EventKind, Phase
from holdfast_workers.messages import Tier


def accuse(state: State, fault: Fault, now: float) -> None:
    """A fault of the present world condemns it; between worlds it is one more cause.

    A job whose last state is durable already needs no recovery any more: it has succeeded.
    """
    if state.stage not in WITH_WORLD:
        if state.incident is not None:
            _record(state, fault, now)
        return
    if ending.is_durable(state):
        ending.succeed(state, now)
        return
    _record(state, fault, now)
    state.batch.append(fault)
    wait_s = state.config.gather_s if _is_explained(state) else state.config.communication_wait_s
    if state.stage is Stage.GATHERING:
        assert state.deadline is not None
        state.deadline = min(state.deadline, now + wait_s)
        return
    state.show(Phase.RECOVERING)
    state.enter(Stage.GATHERING, now, wait_s)


def judge_batch(state: State, now: float) -> bool:
    """The siblings are in: the world ends. True if a new attempt is to be formed."""
    config, batch = state.config, tuple(state.batch)
    first = primary(batch)
    state.spent("gather", now - state.since)
    recent = within_window(state.failures, now, config.window_s)
    state.failures = (*recent, now)
    verdict = judge(
        batch,
        failures=state.failures,
        remembered=state.mark,
        now=now,
        max_failures=config.max_failures,
        window_s=config.window_s,
    )
    if state.incident is not None:
        state.incident = replace(
            state.incident, failures=(*state.incident.failures, now), reason=first.what
        )
    if isinstance(verdict, GiveUp):
        state.update_incident(decision="stop", reason=verdict.message)
        ending.fail(state, now, verdict.code, verdict.message, verdict.traceback)
        return False
    if verdict.mark is not None:
        state.mark = verdict.mark
        state.update_incident(mark=verdict.mark)
    hosts = state.world.hosts() if state.world is not None else set()
    state.unproven = set() if any(fault.certain for fault in batch) else hosts
    ending.end_attempt(state, first.what)
    state.batch = []
    return True


def distrust_source(state: State, rank: int, *, for_ever: bool, why: str) -> None:
    """What the rank was told to restore from is not to be used again.

    `for_ever` if it was seen to be bad; a mere failure to fetch it holds for this life of the
    agent that has it, which verifies its segments when it comes back.
    """
    if state.world is None or rank not in state.world.members:
        return
    source = state.world.members[rank].restore
    if source.tier is Tier.REMOTE:
        if source.uri not in state.saves.bad_uris:
            state.saves.bad_uris.add(source.uri)
            state.emit(EventKind.CHECKPOINT_BAD, step=source.step, uri=source.uri, message=why)
    elif source.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
        record = state.roster.record(source.agent)
        life = record.incarnation if record is not None and not for_ever else ""
        add_bad(
            state,
            BadCopy(source.agent, source.place, rank, source.attempt, source.step, life),
        )


def add_bad(state: State, bad: BadCopy) -> None:
    """Never restore from this copy again; the open incident carries it over a restart."""
    if bad in state.bad:
        return
    state.bad.add(bad)
    if state.incident is not None:
        told = {**bad.__dict__, "place": bad.place.value}
        state.update_incident(bad=(*state.incident.bad, told))
        state.tell_incident()


def _record(state: State, fault: Fault, now: float) -> None:
    if state.incident is None:
        state.incidents += 1
        state.incident = Incident.opened(state.incidents, fault, now)
        state.tell_incident(EventKind.INCIDENT_OPENED)
    elif fault not in state.incident.faults:
        state.incident = state.incident.with_fault(fault)
        state.tell_incident()


def _is_explained(state: State) -> bool:
    """Whether the batch names a culprit, or every rank lives to tell that it has none."""
    if any(fault.cause is not Cause.COMMUNICATION for fault in state.batch):
        return True
    assert state.world is not None
    told = {fault.rank for fault in state.batch}
    return told >= set(state.world.members)
