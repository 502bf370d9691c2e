"""How often the tiers of `auto` are saved: measured, decided, told to rank 0.

The decision reaches the ranks through the agreement (rank 0's record), so all take it over at the
same step; a new attempt starts with it. It is an event each time, with its reasons in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.policy.checkpoint_intervals import (
    AutoTier,
    Choice,
    Costs,
    choose,
    differs,
    mean_time_between_failures_s,
    needed_remote,
    spread,
)
from holdfast_service.recovery.core_state.effects import SetIntervals
from holdfast_service.recovery.core_state.state import Stage, State, World
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.messages import StepRow, Tier


def measured(state: State, rows: Sequence[StepRow]) -> None:
    """Steps were made: has their cost changed what is best?"""
    hurried = state.world is not None and node_eligibility.any_drains(state, state.world.hosts())
    if state.outage is not None or hurried:
        return  # neither saves that wait for the remote tier to answer are a measure, nor these
    state.costs.take(rows)
    if state.stage is not Stage.RUNNING:
        return
    before = dict(state.intervals)
    for tier in sorted(state.config.auto):
        _decide(state, tier)
    if state.intervals != before:
        tell(state)


def recovered(state: State, tiers: Iterable[Tier]) -> None:
    """An incident is over, with state from these tiers."""
    state.restores += 1
    state.remote_restores += needed_remote(tiers)


def _decide(state: State, tier: AutoTier) -> None:
    cost_s, step_s = state.costs.of(tier), state.costs.step_s
    every = state.intervals[tier]
    if tier is AutoTier.REMOTE and state.costs.is_crowded(every):
        state.costs = Costs()
        _take_over(state, spread(tier, every))
        return
    if cost_s is None or step_s is None:
        return
    config = state.config
    failures = state.restores if tier is AutoTier.MEMORY else state.remote_restores
    trained_s = state.committed * step_s
    mtbf_s = mean_time_between_failures_s(tier, failures, trained_s, config.nodes)
    choice = choose(tier, cost_s, mtbf_s, step_s, config.overhead_target)
    if tier not in state.chosen or differs(every, choice.every_steps):
        _take_over(state, choice)


def _take_over(state: State, choice: Choice) -> None:
    before = state.intervals[choice.tier]
    state.chosen.add(choice.tier)
    state.intervals[choice.tier] = choice.every_steps
    state.emit(EventKind.CHECKPOINT_INTERVAL, before=before, **choice.data())


def tell(state: State) -> None:
    """Let rank 0 bring the present intervals to the agreement."""
    world = state.world
    assert world is not None
    lead = world.members[0]
    state.ask(SetIntervals(lead.agent, world.attempt, *present(state, world), lead.incarnation))


def present(state: State, world: World) -> tuple[int, int]:
    """Steps between two saves to memory, and to the remote tier. As often as it can be while a
    node with ranks is about to go."""
    if node_eligibility.any_drains(state, world.hosts()):
        return 1, 1
    return state.intervals[AutoTier.MEMORY], state.intervals[AutoTier.REMOTE]
