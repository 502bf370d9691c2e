"""From the first fault to the decision: open the incident, gather related faults, decide.

A fault of the present world condemns it, unless training can go on with it and nothing better is
available. The module also records saved states that must not be restored again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from holdfast_service.diagnosis.standstill import describe_ended
from holdfast_service.job_model.events.checkpoints import CheckpointBadEvent
from holdfast_service.job_model.events.incidents import IncidentClosedEvent, IncidentOpenedEvent
from holdfast_service.job_model.lifecycle import Phase
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Cause, Fault, error_mark_of, is_planned, primary_fault
from holdfast_service.policy.decision_ladder import Action, decide, is_tolerable
from holdfast_service.recovery.core_state.stage_timer import WITH_WORLD, Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.nodes import situation
from holdfast_service.recovery.upkeep import remote_tier
from holdfast_service.recovery.world import graceful_stop, outcome
from holdfast_workers.errors import short_error
from holdfast_workers.protocol.messages import (
    UNKNOWN_STEP,
    ErrorKind,
    ErrorReport,
    Place,
    Restore,
    Tier,
)


def report_faults(state: CoreState, faults: Iterable[Fault], now: float) -> None:
    """Report the faults that an input has shown, in their order."""
    for fault in faults:
        report_fault(state, fault, now)


def report_fault(state: CoreState, fault: Fault, now: float) -> None:
    """Record a fault. A fault of the present world condemns it; between worlds it only joins the
    open incident.

    A job whose last state is durable ends as succeeded instead. A fault with which the world still
    commits steps is ignored if no better node is available.
    """
    if state.timer.stage not in WITH_WORLD:
        if state.incidents.current is not None:
            _record_fault(state, fault, now)
        return
    if outcome.is_last_step_durable(state):
        outcome.conclude(state, now)
        return
    if is_tolerable(fault.cause) and _is_ignored(state, fault, now):
        return
    fault = replace(fault, on_notice=situation.is_on_notice(state, fault))
    _record_fault(state, fault, now)
    state.incidents.gather(fault)
    wait_s = state.config.gather_s if _is_explained(state) else state.config.communication_wait_s
    state.set_phase(Phase.RESIZING if is_planned(state.incidents.batch) else Phase.RECOVERING)
    if state.timer.stage is Stage.GATHERING:
        state.timer.shorten(now + wait_s)
        return
    state.enter(Stage.GATHERING, now, wait_s)


def judge_batch(state: CoreState, now: float) -> bool:
    """End the world after its faults were gathered. True if a new attempt must be formed."""
    batch = _explained_batch(state, now)
    first = primary_fault(batch)
    situation.record_condemned_attempt(state, batch, now)
    assessed = situation.assess(state, batch, now)
    decision = decide(assessed)
    state.incidents.record_decision(decision, assessed.budget)
    if decision.end is not None:
        if graceful_stop.ends_as_requested(state, decision.end, now):
            return False
        end = decision.end
        outcome.fail(state, now, end.code, end.message, end.traceback)
        return False
    state.incidents.carry_out(decision)
    mark = error_mark_of(first)
    if mark is not None:
        state.progress.remember_error(mark, first.attempt)
        state.incidents.amend(mark=mark)
    for fault in batch:
        if fault.cause in _DISTRUSTED and fault.worker is not None:
            state.roster.exclude_worker(fault.worker)
    world = state.worlds.present
    state.fencing.require_proof(world.incarnations() if world is not None else ())
    if any(fault.certain for fault in batch):
        state.fencing.record_member_left()
    outcome.end_attempt(state, first.what)
    state.incidents.forget_batch()
    return True


_DISTRUSTED = frozenset({Cause.HANG, Cause.CORRUPTION, Cause.STRAGGLER})
"""Causes whose processes may still live; they never host a rank again."""


def _is_ignored(state: CoreState, fault: Fault, now: float) -> bool:
    """Whether the fault is ignored. An ignored fault is recorded as a closed incident without cost,
    once per window."""
    if state.incidents.current is not None or state.timer.stage is not Stage.RUNNING:
        return False
    before = state.budget.offences
    situation.record_offences(state, (fault,), now)
    assessed = situation.assess(state, (fault,), now)
    coming = situation.budget(state, now, coming=(fault,))
    decision = decide(replace(assessed, budget=coming))
    if decision.action is not Action.IGNORE:
        state.budget.withdraw_offences(before)  # `judge_batch` counts them
        return False
    if not state.budget.record_ignored(fault, now):
        state.budget.withdraw_offences(before)
        return True
    ignored = state.incidents.new_incident(fault, now, state.level)
    ignored = ignored.with_decision(decision, assessed.budget)
    ignored = replace(
        ignored,
        steps_lost=0,  # training goes on
        offences=tuple(offence for offence in state.budget.offences if offence not in before),
    )
    state.emit(IncidentOpenedEvent.of(ignored))
    state.emit(IncidentClosedEvent.of(ignored.closed(now, "detect", "training goes on")))
    return True


def distrust_source(state: CoreState, rank: int, *, for_ever: bool, why: str) -> None:
    """Never use the rank's restore source again.

    `for_ever` if the state was found to be bad. A failure to fetch it holds only for the present
    incarnation of the holding agent, which verifies its segments when it restarts.
    """
    if state.worlds.present is None or rank not in state.worlds.present.members:
        return
    source = state.worlds.present.members[rank].restore
    if source.tier is Tier.REMOTE:
        if state.saves.mark_bad(source.uri):
            state.emit(CheckpointBadEvent(step=source.step, uri=source.uri, message=why))
            remote_tier.request_cleanup(state, source.step)
        return
    if source.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM):
        _distrust_part(state, source, (source.agent, source.place, rank), why, for_ever=for_ever)
    elif source.tier is Tier.RESHARD:
        origins = {(origin.agent, origin.place, origin.rank) for origin in source.origins}
        known = {
            (bad.agent, bad.place, bad.rank)
            for bad in state.saves.bad_copies
            if (bad.attempt, bad.step) == (source.attempt, source.step)
        }
        if not origins & known:  # its agent has not reported which of them failed
            for part in sorted(origins):
                _distrust_part(state, source, part, why, for_ever=for_ever)


def distrust_origins(
    state: CoreState, source: Restore, lost: Collection[tuple[str, Place, int]], why: str
) -> None:
    """Exclude the `lost` parts (agent, place, rank) of a resharding `source`, which could not be
    fetched, for the present incarnation of their agents. The other parts stay usable."""
    for origin in source.origins:
        part = (origin.agent, origin.place, origin.rank)
        if part in lost:
            _distrust_part(state, source, part, why, for_ever=False)


def _distrust_part(
    state: CoreState, source: Restore, part: tuple[str, Place, int], why: str, *, for_ever: bool
) -> None:
    agent, place, rank = part
    record = state.roster.find(agent)
    incarnation = record.incarnation if record is not None and not for_ever else ""
    record_bad_copy(
        state, BadCopy(agent, place, rank, source.attempt, source.step, incarnation), why
    )


def distrust_state(state: CoreState, rank: int, why: str) -> None:
    """Distrust the state that the rank restored: it seems to have been computed wrongly. Its other
    copies are hardly better and are restored only if there is no other state."""
    assert state.worlds.present is not None
    source = state.worlds.present.members[rank].restore
    distrust_source(state, rank, for_ever=True, why=why)
    ranks = {origin.rank for origin in source.origins} or {rank}
    state.saves.doubt_copies(
        BadCopy("", source.place, rank, source.attempt, source.step) for rank in ranks
    )


def record_bad_copy(state: CoreState, bad: BadCopy, why: str) -> None:
    """Never restore from this copy again. A supervisor restart knows a damaged copy from its event,
    and a copy that could not be fetched from the open incident."""
    if not state.saves.mark_bad_copy(bad):
        return
    if not bad.incarnation:
        state.emit(CheckpointBadEvent(step=bad.step, message=why, copy=bad))
    if state.incidents.current is not None:
        state.incidents.amend(bad=(*state.incidents.current.bad, bad))
        state.emit_incident()


def _record_fault(state: CoreState, fault: Fault, now: float) -> None:
    if state.incidents.current is None:
        state.incidents.open(fault, now, state.level)
        state.emit_incident(IncidentOpenedEvent)
    elif state.incidents.add_fault(fault):
        state.emit_incident()


def early_end_fault(
    state: CoreState, ranks: Collection[int], what: str, at: float, traceback: str = ""
) -> Fault:
    """Programs of these ranks have ended with exit code 0, and the others wait for them: the ranks
    of the program disagree on its end."""
    named = tuple(sorted(ranks))
    return Fault(
        Cause.USER_ERROR,
        attempt=state.worlds.attempt,
        at=at,
        what=what,
        rank=named[0] if len(named) == 1 else None,
        ranks=named if len(named) > 1 else (),
        step=state.reached or 0,
        error=ErrorReport(ErrorKind.USER, "EndedEarly", what, traceback, UNKNOWN_STEP),
        certain=False,
    )


def _explained_batch(state: CoreState, now: float) -> tuple[Fault, ...]:
    """The gathered faults, with the newest step that their world has shown: by its reports, or by a
    rank that failed too. It is the step of a rank that shows none itself. Ranks that only lost a
    peer lost one that had ended, if there is one."""
    batch, ended = state.incidents.batch, state.ended_ranks()
    error = next((fault.error for fault in batch if fault.error is not None), None)
    if ended and error is not None and all(f.cause is Cause.COMMUNICATION for f in batch):
        what = f"{describe_ended(ended)}, and the others, which waited, then failed with "
        what += f"{error.type}: {short_error(error.message)}"
        fault = early_end_fault(state, ended, what, batch[0].at, error.traceback)
        _record_fault(state, fault, now)
        batch = (*batch, fault)
    shown = [state.reached] if state.reached is not None else []
    shown += [fault.error.step for fault in batch if _shows_step(fault) and fault.error]
    reached = max(shown, default=None)
    return tuple(
        replace(fault, reached=reached, step=fault.step if _shows_step(fault) else reached or 0)
        if fault.error is not None
        else replace(fault, reached=reached)
        for fault in batch
    )


def _shows_step(fault: Fault) -> bool:
    """Whether its rank itself has shown at which step it failed."""
    return fault.error is not None and fault.error.step != UNKNOWN_STEP


def _is_explained(state: CoreState) -> bool:
    """Whether no further fault is expected, and where its rank failed is known: the batch contains
    a cause other than the communication errors of ranks, or an error of every rank."""
    batch = state.incidents.batch
    causes = [fault for fault in batch if fault.cause is not Cause.COMMUNICATION]
    if any(fault.cause is not Cause.USER_ERROR or _shows_step(fault) for fault in causes):
        return True
    if any(fault.rank is None for fault in batch):
        return True
    assert state.worlds.present is not None
    reported = {fault.rank for fault in batch}
    return reported >= set(state.worlds.present.members)
