"""Save intervals of the `auto` tiers: measured, chosen, and sent to rank 0.

Rank 0 proposes a new interval in the step agreement, so all ranks adopt it at the same step; a new
attempt starts with it. Each change is an event that states its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast_service.job_model.events.checkpoints import CheckpointIntervalEvent
from holdfast_service.policy.checkpoint_intervals import (
    AutoTier,
    IntervalChoice,
    SaveCosts,
    choose_interval,
    doubled_interval,
    is_worth_changing,
    mean_time_between_failures_s,
    needed_remote_tier,
)
from holdfast_service.recovery.core_state.effects import SetIntervals
from holdfast_service.recovery.core_state.state import AttemptWorld, CoreState, Stage
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.messages import StepRow, Tier


def handle_step_rows(state: CoreState, rows: Sequence[StepRow]) -> None:
    """Update the measured costs from step rows; choose new intervals if they have changed."""
    draining = state.world is not None and node_eligibility.any_draining(state, state.world.hosts())
    if state.outage is not None or draining:
        return  # saves during an outage or while a node drains are not representative
    state.costs.add_rows(rows)
    if state.stage is not Stage.RUNNING:
        return
    before = dict(state.intervals)
    for tier in sorted(state.config.auto):
        _decide(state, tier)
    if state.intervals != before:
        request_intervals(state)


def record_restore(state: CoreState, tiers: Iterable[Tier]) -> None:
    """Count an incident whose recovery restored state from these tiers."""
    state.restores += 1
    state.remote_restores += needed_remote_tier(tiers)


def _decide(state: CoreState, tier: AutoTier) -> None:
    cost_s, step_s = state.costs.of(tier), state.costs.step_s
    every = state.intervals[tier]
    if tier is AutoTier.REMOTE and state.costs.saves_overlap(every):
        state.costs = SaveCosts()
        _apply_choice(state, doubled_interval(tier, every))
        return
    if cost_s is None or step_s is None:
        return
    config = state.config
    failures = state.restores if tier is AutoTier.MEMORY else state.remote_restores
    trained_s = state.committed * step_s
    mtbf_s = mean_time_between_failures_s(tier, failures, trained_s, config.nodes)
    choice = choose_interval(tier, cost_s, mtbf_s, step_s, config.overhead_target)
    if tier not in state.measured_tiers or is_worth_changing(every, choice.every_steps):
        _apply_choice(state, choice)


def _apply_choice(state: CoreState, choice: IntervalChoice) -> None:
    before = state.intervals[choice.tier]
    state.measured_tiers.add(choice.tier)
    state.intervals[choice.tier] = choice.every_steps
    state.emit(CheckpointIntervalEvent(choice=choice, before=before))


def request_intervals(state: CoreState) -> None:
    """Request that rank 0 proposes the present intervals in the step agreement."""
    world = state.world
    assert world is not None
    lead = world.members[0]
    state.request(
        SetIntervals(lead.agent, world.attempt, *current_intervals(state, world), lead.incarnation)
    )


def current_intervals(state: CoreState, world: AttemptWorld) -> tuple[int, int]:
    """Steps between two saves to memory, and to the remote tier. Both are 1 while a node with ranks
    drains."""
    if node_eligibility.any_draining(state, world.hosts()):
        return 1, 1
    return state.intervals[AutoTier.MEMORY], state.intervals[AutoTier.REMOTE]
