"""How a supervisor begins: with a first attempt, or by taking over what a former one left."""

from __future__ import annotations

from holdfast_service.job_model.supervisor_protocol import Phase
from holdfast_service.placement.rank_assignment import Assignment, assign
from holdfast_service.policy.causes import Cause, Fault
from holdfast_service.recovery.core_state.state import Member, Stage, State, World
from holdfast_service.recovery.faults import hang_suspicion, judgement
from holdfast_service.recovery.nodes import node_eligibility
from holdfast_service.recovery.signals import signal_handlers
from holdfast_service.recovery.world import attempt_formation, outcome, stop_proof
from holdfast_workers.protocol.messages import Restore, Tier, WorkerReport, WorkerState

ACTIVE = (WorkerState.JOINING, WorkerState.TRAINING, WorkerState.DONE)


def check_start(state: State, now: float) -> None:
    """Start once everybody is ready, or enough are and the standbys had their chance."""
    config = state.config
    if _report_broken(state, now):
        return
    records = state.roster.live()
    ready = [record for record in records if record.report.ready]
    nodes = node_eligibility.nodes(state, ready, {})
    if not isinstance(assign(config.groups, {}, nodes), Assignment):
        state.enough_since, state.deadline = None, state.start_deadline
    elif len(ready) >= config.nodes + config.standby_nodes:
        attempt_formation.open_attempt(state, now)
    else:
        state.enough_since = now if state.enough_since is None else state.enough_since
        patience = state.enough_since + config.standby_wait_s
        state.deadline = min(state.start_deadline, patience)


def start_deadline(state: State, now: float) -> None:
    """Time is up: start with what is enough, or say what was missing."""
    if state.enough_since is not None:
        attempt_formation.open_attempt(state, now)
        return
    config = state.config
    there = state.roster.live()
    ready = [one.agent for one in there if one.report.ready and not one.report.failure]
    unready = [one.agent for one in there if not (one.report.ready or one.report.failure)]
    waiting = f"; not ready: {', '.join(unready)}" if unready else ""
    broken = {one.agent: one.report.failure for one in there if one.report.failure}
    waiting += "".join(
        f"; {agent} cannot run workers: {why.get('message', 'it does not say why')}"
        for agent, why in broken.items()
    )
    avoided = {one.agent: why for one in there if (why := node_eligibility.why_avoided(state, one))}
    waiting += "".join(f"; {agent} is not used: {why}" for agent, why in avoided.items())
    message = (
        f"{len(ready)} of {config.nodes} training nodes were ready within "
        f"{config.start_timeout_s:g} s{waiting}"
    )
    outcome.fail(state, now, "start_timeout", message)


def check_adoption(state: State, now: float) -> None:
    """Adopt the last attempt if all of it is there; form anew once all agents say it is not."""
    active = _whole_world(state)
    if active is not None:
        _adopt(state, active, now)
    elif len(state.roster.live()) >= state.config.nodes + state.config.standby_nodes:
        form_anew(state, now)


def form_anew(state: State, now: float) -> None:
    """What the former supervisor left cannot be taken over as it is."""
    facts = state.facts
    assert facts is not None
    branch = state.newest_branch()
    if branch is None or branch.attempt <= facts.over:
        if state.incident is not None:
            state.show(Phase.RECOVERING)
        lives = {(one["agent"], one["incarnation"]) for one in facts.members}
        stop_proof.is_needed(state, lives - facts.gone)
        attempt_formation.open_attempt(state, now)
        _replay(state, now)
        return
    state.world = _world_of_facts(state, now)
    attempt_formation.settle(state, state.world)
    state.enter(Stage.FORMING, now, state.config.form_timeout_s)
    for fault in _what_is_missing(state, state.world, now):
        judgement.accuse(state, fault, now)
    _replay(state, now)


def _report_broken(state: State, now: float) -> bool:
    """End at once if so many agents cannot run workers that too few are left."""
    config = state.config
    failures = [one.report.failure for one in state.roster.live() if one.report.failure]
    if not failures or config.nodes + config.standby_nodes - len(failures) >= config.nodes:
        return False
    first = failures[0]
    code = "user_error" if first.get("type") else "start_failed"
    message = str(first.get("message", "an agent cannot run workers"))
    outcome.fail(state, now, code, message, first.get("traceback"))
    return True


def _last_formed(state: State) -> int:
    """The attempt that may be running. A journal that was cut short may not tell of its forming;
    then the agents' workers do."""
    branch = state.newest_branch()
    if branch is not None:
        return branch.attempt
    workers = (one for record in state.roster.live() for one in record.report.workers)
    return max((one.attempt for one in workers if one.state in ACTIVE), default=0)


def _whole_world(state: State) -> dict[int, tuple[str, WorkerReport]] | None:
    """Rank → (agent, worker) of the last attempt formed, if every rank is alive in it."""
    facts, attempt = state.facts, _last_formed(state)
    assert facts is not None
    if not attempt or attempt <= facts.over or attempt < facts.attempt:
        return None
    found: dict[int, tuple[str, WorkerReport]] = {}
    for record in state.roster.live():
        for one in record.report.workers:
            belongs = one.attempt == attempt and one.rank is not None
            if not belongs or one.state not in ACTIVE or one.failure is not None:
                continue
            if one.rank in found or state.roster.is_dead(one.worker):
                return None
            stopped = one.state is WorkerState.DONE and one.step < state.config.steps
            if stopped and state.stop is None:
                return None  # for a pause that was undone meanwhile
            assert one.rank is not None
            found[one.rank] = (record.agent, one)
    return found if len(found) == state.config.world_size else None


def _adopt(state: State, active: dict[int, tuple[str, WorkerReport]], now: float) -> None:
    """Take the living world over without touching it."""
    facts, attempt = state.facts, _last_formed(state)
    assert facts is not None
    if state.newest_branch() is None:
        # It started no earlier than the newest checkpoint that was finished before it.
        older = [one.step for one in state.saves.remotes.values() if one.attempt < attempt]
        state.line = state.line.formed(attempt, max(older, default=0))
    branch = state.newest_branch()
    assert branch is not None
    partners = {one["rank"]: tuple(one["partners"]) for one in facts.members}
    members: dict[int, Member] = {}
    for rank, (agent, one) in sorted(active.items()):
        record = state.roster.record(agent)
        assert record is not None
        members[rank] = Member(
            rank=rank,
            agent=agent,
            incarnation=record.incarnation,
            node_id=record.report.node_id,
            host=record.report.host,
            worker=one.worker,
            role="kept",
            restore=Restore(tier=Tier.INIT, step=branch.restored_step),
            partners=partners.get(rank, ()),
            pid=one.pid,
            joined=one.state is not WorkerState.JOINING,
            done=one.state is WorkerState.DONE,
        )
        if members[rank].done:
            state.final_step = one.step
    world = World(attempt, branch.restored_step, members, formed_at=now, placed_at=now)
    state.world, state.attempt = world, branch.attempt
    attempt_formation.settle(state, world)
    running = facts.running == branch.attempt
    if running:
        world.joined_at = world.first_step_at = now
        world.first_step = max(facts.committed, branch.restored_step)
        state.show(Phase.RUNNING)
        state.enter(Stage.RUNNING, now, None)
        hang_suspicion.look_soon(state, now)
    else:
        state.show(Phase.RECOVERING if state.incident else Phase.STARTING)
        state.enter(Stage.FORMING, now, state.config.form_timeout_s)
    # What a worker that is still joining says of its step is of the attempt before.
    steps = [one.step for _, one in active.values() if one.state is not WorkerState.JOINING]
    _catch_up(state, world, max(steps, default=0), now)


def _catch_up(state: State, world: World, step: int, now: float) -> None:
    signal_handlers.first_step_seen(state, world.attempt, step, now)
    attempt_formation.advance(state, now)
    if state.stage is Stage.RUNNING and any(m.done for m in world.members.values()):
        attempt_formation.finish(state, now)
    for record in state.roster.live():
        if record.agent not in world.hosts():
            attempt_formation.welcome(state, record)
        for shard in record.report.shards:
            signal_handlers.shard_saved(
                state, int(shard["attempt"]), int(shard["rank"]), dict(shard)
            )
    _replay(state, now)


def _replay(state: State, now: float) -> None:
    early, state.early = state.early, []
    for signal in early:
        if state.stage is not Stage.ENDED:
            signal_handlers.hear(state, signal, now)


def _world_of_facts(state: State, now: float) -> World:
    facts, branch = state.facts, state.newest_branch()
    assert facts is not None and branch is not None
    fields = ("rank", "agent", "incarnation", "node_id", "host", "worker", "role", "pid")
    source = Restore(tier=Tier.INIT, step=branch.restored_step)
    members = {
        one["rank"]: Member(
            restore=source,
            partners=tuple(one["partners"]),
            **{name: one[name] for name in fields},
        )
        for one in facts.members
    }
    return World(branch.attempt, branch.restored_step, members, formed_at=now)


def _what_is_missing(state: State, world: World, now: float) -> list[Fault]:
    found: list[Fault] = []
    for member in world.members.values():
        record = state.roster.record(member.agent)
        why = None
        if record is None or not record.live:
            cause, why = Cause.AGENT_LOST, f"agent {member.agent} does not answer"
        elif record.incarnation != member.incarnation:
            cause, why = Cause.AGENT_LOST, f"agent {member.agent} was restarted"
        elif member.worker is not None and state.roster.worker(member.worker) is None:
            cause, why = Cause.WORKER_CRASH, f"rank {member.rank} on {member.agent} is gone"
        if why is not None:
            what = f"{why}, as a restarted supervisor found"
            certain = record is not None and record.live
            found.append(
                Fault(
                    cause,
                    attempt=world.attempt,
                    at=now,
                    what=what,
                    rank=member.rank,
                    worker=member.worker,
                    agent=member.agent,
                    step=state.committed,
                    certain=certain,
                )
            )
    if found:
        return found
    what = f"attempt {world.attempt} was found stopped by a restarted supervisor"
    return [Fault(Cause.NO_PROGRESS, attempt=world.attempt, at=now, what=what, certain=False)]
