"""The recovery core: a sans-I/O state machine that forms attempts and gets over faults.

It owns the decisions of a supervisor and nothing else: no clock, no I/O, no Ray. The shell feeds
inputs with the present time and carries out the effects in order. What others lean on:

- Attempt numbers only grow; a world is formed at most once per number, only of agents that have
  made way for it, and of workers not known to be dead.
- Every stage but running has a deadline; every job that ends has a named reason.
- After `End` there is no further effect.
"""

from __future__ import annotations

from holdfast_service.policy import Cause, Fault
from holdfast_service.recovery import agents, assembly, ending, faults, finalizing, forming, hearing
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.effects import Effect
from holdfast_service.recovery.facts import Facts
from holdfast_service.recovery.inputs import (
    AgentLost,
    AgentUp,
    CancelRequested,
    CheckpointFinalized,
    CommandFailed,
    Fenced,
    Input,
    NodeWord,
    RemoteCheckpoints,
    Signals,
    StepCommitted,
    Tick,
)
from holdfast_service.recovery.roster import Roster
from holdfast_service.recovery.saves import RemoteSaves
from holdfast_service.recovery.state import Stage, State
from holdfast_service.reports import Phase


class RecoveryCore:
    """One per supervisor. `facts`: what the journal says, if this supervisor is not the first."""

    def __init__(self, config: RecoveryConfig, now: float, facts: Facts | None = None) -> None:
        state = State(
            config=config,
            roster=Roster(),
            saves=RemoteSaves(config.world_size, config.remotes),
            stage=Stage.ASSEMBLING,
            since=now,
            deadline=now + config.start_timeout_s,
            start_deadline=now + config.start_timeout_s,
        )
        self._state = state
        if facts is not None and (facts.attempt or facts.ended):
            _remember(state, facts, now)

    def handle(self, given: Input, now: float) -> tuple[Effect, ...]:
        """Take one input at `now` (`time.time()`); the effects to carry out, in order."""
        state = self._state
        if state.stage is Stage.ENDED:
            return ()
        state.out = []
        if state.facts is None:
            state.show(state.phase)
        self._dispatch(given, now)
        if state.stage is Stage.ASSEMBLING:
            assembly.check_start(state, now)
        elif state.stage is Stage.ADOPTING:
            assembly.check_adoption(state, now)
        finalizing.hand_out(state)
        return tuple(state.out)

    def next_deadline(self) -> float | None:
        """When to send a `Tick` at the latest; None only while running undisturbed or ended."""
        return self._state.deadline

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def stage(self) -> Stage:
        """Where the core stands, finer than the phase: for logs and tests."""
        return self._state.stage

    @property
    def attempt(self) -> int:
        """The newest attempt announced; 0 before the first."""
        return self._state.attempt

    @property
    def committed(self) -> int:
        """The newest step known to be committed on the present line of history."""
        return self._state.committed

    def _dispatch(self, given: Input, now: float) -> None:
        state = self._state
        match given:
            case AgentUp():
                agents.arrived(state, given.report, now)
            case AgentLost():
                agents.lost(state, given, now)
            case NodeWord():
                agents.node_told(state, given)
            case Signals():
                hearing.hear_all(state, given.signals, now)
            case Fenced():
                agents.made_way(state, given, now)
            case CommandFailed():
                agents.command_failed(state, given, now)
            case StepCommitted():
                hearing.first_step_seen(state, given.attempt, given.step, now)
            case RemoteCheckpoints():
                finalizing.replace_known(state, given, now)
            case CheckpointFinalized():
                finalizing.finalized(state, given, now)
            case CancelRequested():
                _cancel(state, given.reason, now)
            case Tick():
                _tick(state, now)


def _remember(state: State, facts: Facts, now: float) -> None:
    state.facts = facts
    state.attempt, state.line, state.committed = facts.attempt, facts.line, facts.committed
    state.failures, state.incidents, state.incident = (
        facts.failures,
        facts.incidents,
        facts.incident,
    )
    state.mark, state.bad = facts.mark, set(facts.bad)
    state.saves.bad_uris |= facts.bad_uris
    state.saves.announced |= facts.saved
    state.waiting_until = facts.waiting_until
    state.phase = Phase.RECOVERING if facts.incident is not None else Phase.RUNNING
    if not facts.running:
        state.phase = Phase.STARTING
    if facts.ended is not None:
        state.phase = Phase.ENDED
        state.enter(Stage.ENDED, now, None)
    else:
        state.enter(Stage.ADOPTING, now, state.config.adopt_timeout_s)


def _cancel(state: State, reason: str, now: float) -> None:
    ending.end(state, now, outcome="CANCELLED", code="cancelled", message=reason)


def _tick(state: State, now: float) -> None:
    if state.deadline is None or now < state.deadline:
        return
    config = state.config
    match state.stage:
        case Stage.ASSEMBLING:
            assembly.start_deadline(state, now)
        case Stage.ADOPTING:
            assembly.form_anew(state, now)
        case Stage.GATHERING:
            if faults.judge_batch(state, now):
                forming.open_attempt(state, now)
        case Stage.FENCING:
            forming.give_up_on_silent(state, now)
        case Stage.WAITING:
            waited = f"no {state.waiting_for}: none came within {config.wait_for_replacement_s:g} s"
            ending.fail(state, now, "no_replacement", waited + _after_what(state))
        case Stage.FORMING:
            _forming_is_late(state, now)
        case Stage.FINISHING:
            if ending.is_durable(state):
                ending.succeed(state, now)
            else:
                late = f"the last checkpoint was not durable within {config.finish_timeout_s:g} s"
                ending.fail(state, now, "final_checkpoint", late)
        case Stage.RUNNING | Stage.ENDED:
            pass


def _after_what(state: State) -> str:
    if state.incident is None or not state.incident.faults:
        return ""
    return f", after: {state.incident.faults[-1].what}"


def _forming_is_late(state: State, now: float) -> None:
    """A committed step proves that all joined, whatever was not heard; else somebody hangs."""
    world = state.world
    assert world is not None
    if world.first_step is not None:
        for member in world.members.values():
            member.joined = True
        forming.advance(state, now)
        return
    absent = [m for m in world.members.values() if not (m.joined or m.done)]
    for member in absent:
        if member.worker is not None:
            state.roster.doubt(member.worker)
    ranks = ", ".join(str(member.rank) for member in absent)
    what = f"ranks {ranks} did not join attempt {world.attempt} in time"
    if not absent:
        what = f"attempt {world.attempt} made no step in time after all ranks had joined"
    faults.accuse(
        state,
        Fault(
            Cause.NO_PROGRESS,
            attempt=world.attempt,
            at=now,
            what=what,
            rank=absent[0].rank if absent else None,
            agent=absent[0].agent if absent else None,
            worker=absent[0].worker if absent else None,
            step=world.restored_step,
            certain=False,
        ),
        now,
    )
