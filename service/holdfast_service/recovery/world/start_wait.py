"""What the present attempt still waits for before it has started. Pure: reads the state only.

It travels with each report and is stored in the job's row: ranks that join one after the other are
no events.
"""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import StartWait
from holdfast_service.placement.rank_assignment import format_ranks
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld
from holdfast_service.wording import shortened


def start_wait(state: CoreState) -> StartWait | None:
    """The present wait of a start; None: the attempt has started, or a `WaitingEvent` has stated
    for which resource it waits."""
    timer, world = state.timer, state.worlds.present
    match timer.stage:
        case Stage.ASSEMBLING:
            return StartWait(_nodes(state), timer.since, timer.deadline)
        case Stage.FENCING:
            agents = ", ".join(sorted(state.fencing.awaiting)) or "all nodes"
            return StartWait(f"answer of {agents} to the new attempt", timer.since, timer.deadline)
        case Stage.FORMING if world is not None:
            return StartWait(_ranks(world), world.joined_at or timer.since, timer.deadline)
        case Stage.RUNNING if world is not None and not world.is_running:
            return StartWait(
                _first_step(state, world), world.joined_at or timer.since, timer.deadline
            )
    return None


def _nodes(state: CoreState) -> str:
    """`an agent on 2 of 3 nodes`, `n1 to install the job's packages and load torch`."""
    spec = state.config.spec
    wanted = state.config.best_shape.nodes + spec.resources.standby_nodes
    records = state.roster.live()
    if len(records) < wanted:
        missing = f"{wanted - len(records)} of {wanted} nodes" if wanted > 1 else "its node"
        return f"an agent on {missing}"
    late = sorted(record.agent for record in records if not record.report.ready)
    does = "install the job's packages and load torch" if spec.runtime_env.pip else "load torch"
    return f"{shortened(late) or 'the nodes'} to {does}"


def _ranks(world: AttemptWorld) -> str:
    absent = [m.rank for m in world.members.values() if not (m.joined or m.has_stopped)]
    return f"{format_ranks(absent)} to join" if absent else "the first step"


def _first_step(state: CoreState, world: AttemptWorld) -> str:
    """A program's agents watch it for silence; no other limit ends its attempt before a step."""
    if world.evaluates_first:
        return "the evaluation of the first step, which is committed after it"
    silence_s, limit_s = state.config.spec.program.silence_s, state.config.program_progress_s
    return (
        f"the first step of its program (it counts as started after {limit_s:g} s without one); "
        f"a rank that prints and computes nothing for {silence_s:g} s is inspected"
    )
