"""From the first sign of a fault to the verdict: open the incident, gather its siblings, judge."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast_service.job_model.supervisor_protocol import EventKind, Phase
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, Fault, mark_of, primary
from holdfast_service.policy.decision_ladder import Action, Decision, decide, is_tolerable
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.state import WITH_WORLD, Stage, State
from holdfast_service.recovery.nodes import situation
from holdfast_service.recovery.upkeep import draining, remote_cleanup_orders
from holdfast_service.recovery.world import graceful_stop, outcome, stop_proof
from holdfast_workers.protocol.messages import Place, Restore, Tier


def accuse(state: State, fault: Fault, now: float) -> None:
    """A fault of the present world condemns it; between worlds it is one more cause.

    A job whose last state is durable already needs no recovery any more: it has succeeded. A fault
    with which steps are still made condemns nothing where nothing better is at hand.
    """
    if state.stage not in WITH_WORLD:
        if state.incident is not None:
            _record(state, fault, now)
        return
    if outcome.is_durable(state):
        outcome.conclude(state, now)
        return
    if is_tolerable(fault.cause) and _is_let_be(state, fault, now):
        return
    fault = replace(fault, on_notice=draining.on_notice(state, fault))
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
    batch = tuple(state.batch)
    first = primary(batch)
    state.spent("gather", now - state.since)
    situation.count(state, batch, now)
    decision = decide(situation.situation(state, batch, now))
    _take_down(state, decision, now)
    if decision.end is not None:
        if graceful_stop.settles(state, decision.end, now):
            return False
        end = decision.end
        outcome.fail(state, now, end.code, end.message, end.traceback)
        return False
    state.judged = decision
    mark = mark_of(first)
    if mark is not None:
        state.mark = mark
        state.update_incident(mark=mark)
    for fault in batch:
        if fault.cause in _DISTRUSTED and fault.worker is not None:
            state.roster.doubt(fault.worker)
    stop_proof.is_needed(state, state.world.lives() if state.world is not None else ())
    if not state.config.lease_s and any(fault.certain for fault in batch):
        state.unproven = set()
    outcome.end_attempt(state, first.what)
    state.batch = []
    return True


_DISTRUSTED = frozenset({Cause.HANG, Cause.CORRUPTION, Cause.STRAGGLER})
"""Their processes live, and are not given a rank again."""


def _take_down(state: State, decision: Decision, now: float) -> None:
    """The decision, and the account that it was taken on, belong to the incident."""
    if state.incident is not None:
        state.incident = state.incident.decided(decision, situation.budget(state, now))


def _is_let_be(state: State, fault: Fault, now: float) -> bool:
    """Whether nothing is done about it: then it is told as an incident that cost nothing, once per
    window."""
    if state.incident is not None or state.stage is not Stage.RUNNING:
        return False
    before = state.offences
    situation.blame(state, (fault,), now)
    budget = situation.budget(state, now, coming=(fault,))
    decision = decide(replace(situation.situation(state, (fault,), now), budget=budget))
    if decision.action is not Action.IGNORE:
        state.offences = before  # counted when it is judged
        return False
    key = (fault.cause.value, fault.agent, fault.rank)
    told_at = state.let_be.get(key)
    if told_at is not None and now < told_at + state.config.window_s:
        state.offences = before
        return True
    state.let_be[key] = now
    state.incidents += 1
    told = Incident.opened(state.incidents, fault, now)
    told = told.decided(decision, situation.budget(state, now))
    told = replace(told, offences=tuple(one for one in state.offences if one not in before))
    state.emit(EventKind.INCIDENT_OPENED, **told.data())
    state.emit(EventKind.INCIDENT_CLOSED, **told.closed(now, "training goes on").data())
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
            remote_cleanup_orders.begin(state, source.step)
        return
    if source.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
        _distrust(state, source, (source.agent, source.place, rank), why, for_ever=for_ever)
    elif source.tier is Tier.RESHARD:
        origins = {(one.agent, one.place, one.rank) for one in source.origins}
        known = {
            (bad.agent, bad.place, bad.rank)
            for bad in state.bad
            if (bad.attempt, bad.step) == (source.attempt, source.step)
        }
        if not origins & known:  # its agent has not told which of them failed
            for one in sorted(origins):
                _distrust(state, source, one, why, for_ever=for_ever)


def distrust_origins(
    state: State, source: Restore, lost: Collection[tuple[str, Place, int]], why: str
) -> None:
    """Of what `source` is to be put together from, these parts (agent, place, rank) could not be
    had: they are not asked for again in this life of their agents. The others stay good."""
    for one in source.origins:
        part = (one.agent, one.place, one.rank)
        if part in lost:
            _distrust(state, source, part, why, for_ever=False)


def _distrust(
    state: State, source: Restore, part: tuple[str, Place, int], why: str, *, for_ever: bool
) -> None:
    agent, place, rank = part
    record = state.roster.record(agent)
    life = record.incarnation if record is not None and not for_ever else ""
    add_bad(state, BadCopy(agent, place, rank, source.attempt, source.step, life), why)


def distrust_state(state: State, rank: int, why: str) -> None:
    """What the rank was told to restore from seems bad as it was computed: other copies of it are
    hardly better, and are taken only where there is no other state."""
    assert state.world is not None
    source = state.world.members[rank].restore
    distrust_source(state, rank, for_ever=True, why=why)
    ranks = {one.rank for one in source.origins} or {rank}
    state.doubted |= {BadCopy("", source.place, one, source.attempt, source.step) for one in ranks}


def add_bad(state: State, bad: BadCopy, why: str) -> None:
    """Never restore from this copy again; what carries it over a restart is the event of a copy
    that is damaged, and the open incident for one that could not be had."""
    if bad in state.bad:
        return
    state.bad.add(bad)
    told = {**bad.__dict__, "place": bad.place.value}
    if not bad.incarnation:
        state.emit(EventKind.CHECKPOINT_BAD, step=bad.step, uri="", message=why, copy=told)
    if state.incident is not None:
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
