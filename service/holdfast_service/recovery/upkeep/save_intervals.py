"""Save intervals of the `auto` tiers: measured, chosen, and sent to rank 0.

Rank 0 proposes a new interval in the step agreement, so all ranks adopt it at the same step; a new
attempt starts with it. Each change is an event that states its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.job_model.events.checkpoints import CheckpointIntervalEvent
from holdfast_service.policy.checkpoint_intervals import (
    AutoTier,
    IntervalChoice,
    auto_tiers,
    choose_interval,
    doubled_interval,
    is_worth_changing,
    mean_time_between_failures_s,
)
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_workers.protocol.commands import SetIntervals
from holdfast_workers.protocol.messages import StepRow


def handle_step_rows(state: CoreState, rows: Sequence[StepRow]) -> None:
    """Update the measured costs from step rows; choose new intervals if they have changed."""
    if state.incidents.outage is not None or _saves_often(state, state.worlds.present):
        return  # saves during an outage or while a node drains are not representative
    state.intervals.add_rows(rows)
    if state.timer.stage is not Stage.RUNNING:
        return
    before = state.intervals.steps
    for tier in sorted(auto_tiers(state.config.spec)):
        _decide(state, tier)
    if state.intervals.steps != before:
        request_intervals(state)


def _decide(state: CoreState, tier: AutoTier) -> None:
    cost_s, step_s = state.intervals.costs.of(tier), state.intervals.costs.step_s
    every = state.intervals.steps[tier]
    if tier is AutoTier.REMOTE and state.intervals.costs.saves_overlap(every):
        state.intervals.measure_again()
        _apply_choice(state, doubled_interval(tier, every))
        return
    if cost_s is None or step_s is None:
        return
    config = state.config
    failures = (
        state.intervals.restores if tier is AutoTier.MEMORY else state.intervals.remote_restores
    )
    trained_s = state.progress.committed * step_s
    mtbf_s = mean_time_between_failures_s(tier, failures, trained_s, state.worlds.shape.nodes)
    choice = choose_interval(tier, cost_s, mtbf_s, step_s, config.spec.checkpoint.overhead_target)
    if tier not in state.intervals.measured or is_worth_changing(every, choice.every_steps):
        _apply_choice(state, choice)


def _apply_choice(state: CoreState, choice: IntervalChoice) -> None:
    before = state.intervals.apply(choice)
    state.emit(CheckpointIntervalEvent(choice=choice, before=before))


def request_intervals(state: CoreState) -> None:
    """Request that rank 0 proposes the present intervals in the step agreement."""
    world = state.worlds.present
    assert world is not None
    lead = world.members[0]
    state.request(
        SetIntervals(lead.agent, world.attempt, *current_intervals(state, world), lead.incarnation)
    )


def current_intervals(state: CoreState, world: AttemptWorld) -> tuple[int, int]:
    """Steps between two saves to memory, and to the remote tier. Both are 1 while a node with ranks
    drains."""
    if _saves_often(state, world):
        return 1, 1
    return state.intervals.steps[AutoTier.MEMORY], state.intervals.steps[AutoTier.REMOTE]


def _saves_often(state: CoreState, world: AttemptWorld | None) -> bool:
    """Whether every step is saved because a node with ranks drains."""
    if world is None or not state.nodes.draining:
        return False
    return node_eligibility.any_draining(state, world.hosts())
