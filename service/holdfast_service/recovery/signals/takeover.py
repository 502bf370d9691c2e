"""The start of a supervisor: it forms the first attempt, or takes over from a former supervisor.

A running attempt of which every rank is alive is adopted without touching it. Otherwise the missing
ranks become faults of an incident, and a new attempt is formed.
"""

from __future__ import annotations

from holdfast_service.job_model.events.incidents import IncidentOpenedEvent
from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.placement.rank_assignment import Shortage
from holdfast_service.placement.world_shape import assign_best
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.progress import Progress
from holdfast_service.recovery.core_state.roster import AgentRecord, Roster
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import AttemptWorld, Member
from holdfast_service.recovery.faults import hang_suspicion
from holdfast_service.recovery.nodes import mesh_preference, node_eligibility, situation
from holdfast_service.recovery.world import attempt_formation, attempt_progress, outcome, requeue
from holdfast_workers.protocol.answers import WorkerReport
from holdfast_workers.protocol.messages import Restore, Tier, WorkerState

ACTIVE = (WorkerState.JOINING, WorkerState.TRAINING, WorkerState.DONE)


def check_start(state: CoreState, now: float) -> None:
    """Start when all agents are ready, or when enough are and the wait for standbys is over. While
    only a smaller mesh has room, the wait is for the nodes of the best one."""
    config = state.config
    if _end_if_unstartable(state, now):
        return
    records = state.roster.live()
    ready = [record for record in records if record.report.ready]
    nodes = node_eligibility.candidate_nodes(state, ready, {})
    durable = state.saves.newest(state.progress.line)
    state.growth.follow(config.scheduled(durable.step if durable is not None else 0))
    shapes = mesh_preference.wanted_shapes(state)
    found = assign_best(shapes, config.best_shape, {}, nodes)
    if isinstance(found, Shortage):
        if not _give_back_if_unsuitable(state, now):
            state.timer.wait_for_agents()
    elif found.shape != shapes[0]:
        state.timer.wait_for_standbys(now, config.spec.recovery.assemble_wait_s)
    elif len(ready) >= shapes[0].nodes + config.spec.resources.standby_nodes:
        attempt_formation.open_attempt(state, now)
    else:
        state.timer.wait_for_standbys(now, config.standby_wait_s)


def handle_start_deadline(state: CoreState, now: float) -> None:
    """The start deadline is over: start if enough agents are ready, else end with the reason."""
    if state.timer.enough_since is not None:
        attempt_formation.open_attempt(state, now)
        return
    config = state.config
    live = state.roster.live()
    ready = [record.agent for record in live if record.report.ready and not record.report.failure]
    unready = [
        record.agent for record in live if not (record.report.ready or record.report.failure)
    ]
    waiting = f"; not ready: {', '.join(unready)}" if unready else ""
    waiting += "".join(f"; {_inability(record)}" for record in live if record.report.failure)
    avoided = {
        record.agent: why for record in live if (why := node_eligibility.why_avoided(state, record))
    }
    waiting += "".join(f"; {agent} is not used: {why}" for agent, why in avoided.items())
    others = node_eligibility.agents_of_other_builds(state)
    waiting += "".join(
        f"; {agent} runs another build of Holdfast: install the same version on all nodes"
        for agent in others
    )
    message = (
        f"{len(ready)} of {config.best_shape.nodes} training nodes were ready within "
        f"{config.start_timeout_s:g} s{waiting}"
    )
    needed = min(shape.nodes for shape in config.shapes)
    has_trained = state.saves.newest(state.progress.line) is not None
    is_short = len(live) < needed or bool(node_eligibility.unsuitable_nodes(state))
    if (config.requeues and is_short) or (others and has_trained):
        requeue.end(state, now, message)
    else:
        outcome.fail(state, now, "start_timeout", message)


def give_back_unplaced(state: CoreState, now: float) -> None:
    """The queue places the job anew, and it keeps its age there."""
    requeue.end(state, now, "its nodes were taken, and those with room are reserved for others")


def _give_back_if_unsuitable(state: CoreState, now: float) -> bool:
    """All agents have come, and the job lacks nodes because some are too small for it or lack
    software: the queue places it elsewhere, or waits."""
    config = state.config
    unsuitable = node_eligibility.unsuitable_nodes(state)
    known = {record.agent for record in state.roster.live() if record.report.ready}
    known |= unsuitable.keys()
    all_have_come = len(known) >= config.best_shape.nodes + config.spec.resources.standby_nodes
    if not (config.requeues and unsuitable and all_have_come):
        return False
    why = "; ".join(f"{agent} {why}" for agent, why in unsuitable.items())
    can = len(known) - len(unsuitable)
    requeue.end(state, now, f"{can} of {len(known)} nodes can be used; {why}")
    return True


def check_adoption(state: CoreState, now: float) -> tuple[Fault, ...]:
    """Adopt the last attempt if all its ranks are alive. Form a new attempt when all agents have
    reported and that is not so."""
    active = _complete_world(state)
    if active is not None:
        _adopt(state, active, now)
        return ()
    wanted = state.worlds.shape.nodes + state.config.spec.resources.standby_nodes
    return form_new_attempt(state, now) if len(state.roster.live()) >= wanted else ()


def form_new_attempt(state: CoreState, now: float) -> tuple[Fault, ...]:
    """Form a new attempt: the attempt of the former supervisor cannot be adopted. Returns the
    faults of its ranks."""
    facts = state.facts
    assert facts is not None
    branch = state.progress.newest_branch()
    if branch is None or branch.attempt <= facts.over:
        if branch is None:
            _record_lost_attempt(state, now)
        if state.incidents.current is not None:
            state.set_phase(Phase.RECOVERING)
        hosts = {(member.agent, member.incarnation) for member in facts.members}
        state.fencing.require_proof(hosts - facts.gone)
        attempt_formation.open_attempt(state, now)
        return ()
    world = _world_from_facts(state, now)
    if facts.running == branch.attempt:
        world.resume(None, now)  # its rows tell how far it has come
    else:
        world.record_adopted()
    state.worlds.begin(world, state.roster)
    state.enter(Stage.FORMING, now, world.forming_s(state.config))
    return _missing_member_faults(state.roster, world, state.progress.committed, now)


def _record_lost_attempt(state: CoreState, now: float) -> None:
    """Nothing of the last attempt is left on the cluster, its journal included: open the incident
    that no former supervisor could."""
    lost = state.config.plan.lost
    if lost is None or state.incidents.current is not None:
        return
    what = (
        f"the supervisor and all agents of attempt {lost.attempt} are gone, as found when the job "
        "was started again"
    )
    fault = Fault(
        Cause.AGENT_LOST,
        attempt=lost.attempt,
        at=now,
        what=what,
        ranks=tuple(range(lost.world_size)),
        step=lost.step or 0,
        certain=False,
    )
    if lost.step is not None:
        state.progress.record_late_step(lost.step)
    state.incidents.open(fault, now, state.level)
    state.emit_incident(IncidentOpenedEvent)
    situation.record_condemned_attempt(state, (fault,), now)


def _end_if_unstartable(state: CoreState, now: float) -> bool:
    """End the job at once if too few agents can run workers."""
    config = state.config
    unable = [record for record in state.roster.live() if record.report.failure]
    needed = min(shape.nodes for shape in config.shapes)
    if len(unable) <= config.best_shape.nodes + config.spec.resources.standby_nodes - needed:
        return False
    first = unable[0].report.failure
    assert first is not None
    if first.type:
        outcome.fail(state, now, "user_error", first.message, first.traceback)
    else:
        outcome.fail(state, now, "start_failed", "; ".join(map(_inability, unable)))
    return True


def _inability(record: AgentRecord) -> str:
    """Which agent, on which node, cannot run workers, and why."""
    report = record.report
    why = report.failure.message if report.failure is not None else ""
    return f"{record.agent} on {report.host} (node {report.node_id[:12]}) cannot run workers: {why}"


def _last_formed(progress: Progress, roster: Roster) -> int:
    """The attempt that may be running. A truncated journal may lack its event; then the workers of
    the agents show it."""
    branch = progress.newest_branch()
    if branch is not None:
        return branch.attempt
    workers = (worker for record in roster.live() for worker in record.report.workers)
    return max((worker.attempt for worker in workers if worker.state in ACTIVE), default=0)


def _complete_world(state: CoreState) -> dict[int, tuple[str, WorkerReport]] | None:
    """Rank → (agent, worker) of the last attempt formed, if every rank is alive in it."""
    facts, attempt = state.facts, _last_formed(state.progress, state.roster)
    assert facts is not None
    if not attempt or attempt <= facts.over or attempt < facts.attempt:
        return None
    active: dict[int, tuple[str, WorkerReport]] = {}
    for record in state.roster.live():
        for worker in record.report.workers:
            belongs = worker.attempt == attempt and worker.rank is not None
            if not belongs or worker.state not in ACTIVE or worker.failure is not None:
                continue
            if worker.rank in active or state.roster.is_dead(worker.worker):
                return None
            stopped = worker.state is WorkerState.DONE and worker.early is None
            stopped &= worker.step < state.ending.end_step
            if stopped and state.ending.stop is None and not state.config.runs_program:
                return None  # it stopped for a pause that was undone meanwhile
            assert worker.rank is not None
            active[worker.rank] = (record.agent, worker)
    return active if len(active) == state.worlds.shape_of(attempt).world_size else None


def _adopt(state: CoreState, active: dict[int, tuple[str, WorkerReport]], now: float) -> None:
    """Adopt the running world without touching it."""
    facts, attempt = state.facts, _last_formed(state.progress, state.roster)
    assert facts is not None
    if state.progress.newest_branch() is None:
        # It restored no state older than the newest checkpoint finished before it.
        older = [
            checkpoint.step
            for checkpoint in state.saves.remotes.values()
            if checkpoint.attempt < attempt
        ]
        state.progress.add_branch(attempt, max(older, default=0))
    branch = state.progress.newest_branch()
    assert branch is not None
    partners = {member.rank: member.partners for member in facts.members}
    members: dict[int, Member] = {}
    for rank, (agent, worker) in sorted(active.items()):
        record = state.roster.find(agent)
        assert record is not None
        members[rank] = Member(
            rank=rank,
            agent=agent,
            incarnation=record.incarnation,
            node_id=record.report.node_id,
            host=record.report.host,
            worker=worker.worker,
            role="kept",
            restore=Restore(tier=Tier.INIT, step=branch.restored_step),
            partners=partners.get(rank, ()),
            pid=worker.pid,
            joined=worker.state is not WorkerState.JOINING,
            done=worker.state is WorkerState.DONE,
        )
        if members[rank].done:
            state.ending.record_final_step(worker.step)
            attempt_progress.record_early_end(state, worker.step, worker.early)
    world = AttemptWorld(
        attempt,
        state.worlds.shape_of(attempt),
        branch.restored_step,
        members,
        placed_at=now,
    )
    state.worlds.begin(world, state.roster)
    running = facts.running == branch.attempt
    if running:
        world.resume(_first_step(state, branch.restored_step), now)
        state.set_phase(Phase.RUNNING)
        state.enter(Stage.RUNNING, now, None)
        hang_suspicion.inspect_soon(state, now)
    else:
        if any(worker.evaluates_first for _, worker in active.values()):
            world.record_computed(now)
        state.set_phase(Phase.RECOVERING if state.incidents.current else Phase.STARTING)
        state.enter(Stage.FORMING, now, world.forming_s(state.config))
    # The step of a worker that is still joining belongs to the attempt before.
    steps = [
        worker.step for _, worker in active.values() if worker.state is not WorkerState.JOINING
    ]
    newest = max(steps, default=0)
    if any(step != branch.restored_step for step in steps):
        world.record_adopted()
    if state.config.runs_program and world.first_step is None:
        newest = 0  # of a state that it keeps or was offered: its rows tell whether it reports any
    _apply_agent_reports(state, world, newest, now)


def _first_step(state: CoreState, restored: int) -> int | None:
    """The step that counts as the first of an adopted world; None: a program reported none."""
    facts = state.facts
    assert facts is not None
    if state.config.runs_program and not (facts.has_step and facts.committed > restored):
        return None
    return max(facts.committed, restored)


def _apply_agent_reports(state: CoreState, world: AttemptWorld, step: int, now: float) -> None:
    attempt_progress.record_reached_step(state, world.attempt, step, now)
    attempt_progress.advance(state, now)
    for record in state.roster.live():
        if record.agent not in world.hosts():
            attempt_formation.admit_agent(state, record)
        state.saves.record_shards(record.report.shards, state.progress.line, state.worlds)


def _world_from_facts(state: CoreState, now: float) -> AttemptWorld:
    facts, branch = state.facts, state.progress.newest_branch()
    assert facts is not None and branch is not None
    source = Restore(tier=Tier.INIT, step=branch.restored_step)
    members = {seated.rank: Member(**vars(seated), restore=source) for seated in facts.members}
    shape = state.worlds.shape_of(branch.attempt)
    return AttemptWorld(branch.attempt, shape, branch.restored_step, members)


def _missing_member_faults(
    roster: Roster, world: AttemptWorld, step: int, now: float
) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for member in world.members.values():
        record = roster.find(member.agent)
        why = None
        if record is None or not record.live:
            cause, why = Cause.AGENT_LOST, f"agent {member.agent} does not answer"
        elif record.incarnation != member.incarnation:
            cause, why = Cause.AGENT_LOST, f"agent {member.agent} was restarted"
        elif member.worker is not None and roster.worker(member.worker) is None:
            cause, why = Cause.WORKER_CRASH, f"rank {member.rank} on {member.agent} is gone"
        if why is not None:
            description = f"{why}, as found by a restarted supervisor"
            certain = record is not None and record.live
            faults.append(
                Fault(
                    cause,
                    attempt=world.attempt,
                    at=now,
                    what=description,
                    rank=member.rank,
                    worker=member.worker,
                    agent=member.agent,
                    step=step,
                    certain=certain,
                )
            )
    if faults:
        return tuple(faults)
    workers = (worker for record in roster.live() for worker in record.report.workers)
    left = any(
        worker.state is WorkerState.LEFT and worker.attempt == world.attempt for worker in workers
    )
    cause = Cause.RESIZE if left else Cause.NO_PROGRESS
    description = f"a restarted supervisor found that attempt {world.attempt} had stopped"
    return (Fault(cause, attempt=world.attempt, at=now, what=description, certain=False),)
