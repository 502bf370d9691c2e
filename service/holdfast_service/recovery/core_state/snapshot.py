"""The state of the core as one immutable value: for logs, tests and debugging.

Nothing in the core reads a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_service.job_model.supervisor_protocol import Phase, StopOrder
from holdfast_service.placement.restore_points import BadCopy
from holdfast_service.policy.causes import Offence
from holdfast_service.policy.checkpoint_intervals import AutoTier
from holdfast_service.policy.incidents import Incident
from holdfast_service.recovery.core_state.inputs import FaultRequested
from holdfast_service.recovery.core_state.roster import AgentIncarnation, AgentRecord
from holdfast_service.recovery.core_state.save_ledger import PendingManifest
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_service.recovery.core_state.state import CoreState
from holdfast_service.recovery.core_state.worlds import Member
from holdfast_workers.protocol.findings import HealthFinding


@dataclass(frozen=True)
class AgentSnapshot:
    """An agent as known from its last report. `problem`: why it cannot run workers, if so."""

    agent: str
    incarnation: str
    live: bool
    ready: bool
    problem: str

    @classmethod
    def of(cls, record: AgentRecord) -> AgentSnapshot:
        failure = record.report.failure
        problem = failure.message if failure is not None else ""
        return cls(record.agent, record.incarnation, record.live, record.report.ready, problem)


@dataclass(frozen=True)
class MemberSnapshot:
    """A rank of the present world."""

    rank: int
    agent: str
    incarnation: str
    worker: str | None
    partners: tuple[str, ...]
    partners_confirmed: bool
    joined: bool
    done: bool

    @classmethod
    def of(cls, member: Member) -> MemberSnapshot:
        return cls(**{name: getattr(member, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class CoreSnapshot:
    """What the core knows and waits for."""

    stage: Stage
    phase: Phase
    since: float
    """When the stage began."""
    deadline: float | None
    waiting_for: str
    attempt: int
    committed: int
    protected: int
    members: Mapping[int, MemberSnapshot]
    """Rank → its place in the present world; empty between worlds."""
    agents: Mapping[str, AgentSnapshot]
    awaiting: frozenset[str]
    """Agents that have not answered their fence."""
    unproven: frozenset[AgentIncarnation]
    """Hosts of the last world that may still step."""
    failures: tuple[float, ...]
    preemptions: tuple[float, ...]
    offences: tuple[Offence, ...]
    without_progress: int
    incident: Incident | None
    """The open incident."""
    outage: Incident | None
    """The open incident of the remote tier."""
    intervals: Mapping[AutoTier, int]
    restores: int
    remote_restores: int
    pending_manifests: tuple[PendingManifest, ...]
    bad_uris: frozenset[str]
    bad_copies: frozenset[BadCopy]
    is_last_step_durable: bool
    findings: Mapping[str, tuple[HealthFinding, ...]]
    """Agent → the health findings of its node."""
    avoided_nodes: frozenset[str]
    draining_nodes: frozenset[str]
    unchecked_agents: frozenset[str]
    sidelined_agents: frozenset[str]
    bad_links: frozenset[tuple[str, str]]
    stop: StopOrder | None
    requested_faults: tuple[FaultRequested, ...]

    @classmethod
    def of(cls, state: CoreState) -> CoreSnapshot:
        timer, progress, saves, nodes = state.timer, state.progress, state.saves, state.nodes
        world = state.worlds.present
        members = world.members if world is not None else {}
        return cls(
            stage=timer.stage,
            phase=timer.phase,
            since=timer.since,
            deadline=timer.deadline,
            waiting_for=timer.waiting_for,
            attempt=state.worlds.attempt,
            committed=progress.committed,
            protected=progress.protected,
            members={rank: MemberSnapshot.of(member) for rank, member in members.items()},
            agents={record.agent: AgentSnapshot.of(record) for record in state.roster.all()},
            awaiting=state.fencing.awaiting,
            unproven=state.fencing.unproven,
            failures=state.budget.failures,
            preemptions=state.budget.preemptions,
            offences=state.budget.offences,
            without_progress=progress.without_progress,
            incident=state.incidents.current,
            outage=state.incidents.outage,
            intervals=dict(state.intervals.steps),
            restores=state.intervals.restores,
            remote_restores=state.intervals.remote_restores,
            pending_manifests=tuple(saves.pending.values()),
            bad_uris=saves.bad_uris,
            bad_copies=saves.bad_copies,
            is_last_step_durable=saves.has_final(state.ending.last_step, progress.line),
            findings={agent: health.findings for agent, health in nodes.health.items()},
            avoided_nodes=frozenset(nodes.avoided),
            draining_nodes=frozenset(nodes.draining),
            unchecked_agents=frozenset(nodes.unchecked),
            sidelined_agents=state.corruption.sidelined,
            bad_links=frozenset(nodes.bad_links),
            stop=state.ending.stop,
            requested_faults=state.inbox.requested_faults,
        )
