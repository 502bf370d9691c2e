"""The formed attempts: the present world, the world before it, and the homes of the ranks.

Invariants: attempt numbers only grow; a world and its members change only by the operations here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from holdfast_service.job_model.events.attempts import SeatedRank
from holdfast_service.placement.rank_assignment import GroupHome
from holdfast_service.placement.replica_placement import Partners, Placement
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.roster import AgentIncarnation, AgentRecord, Roster
from holdfast_workers.protocol.commands import CommandKind
from holdfast_workers.protocol.messages import Restore, Tier


@dataclass
class Member:
    """A rank of a world. `worker` is None until the forked process has reported its name."""

    rank: int
    agent: str
    incarnation: str
    node_id: str
    host: str
    worker: str | None
    role: str
    restore: Restore
    partners: tuple[str, ...]
    partners_confirmed: bool = True
    """Whether its agent has confirmed that it replicates to them."""
    pid: int | None = None
    joined: bool = False
    done: bool = False
    last_step: int = 0
    """The step at which it was done; 0: the rank of a program shows none."""
    left: bool = False
    """It left the world after a step that was agreed on, so that the mesh can change."""
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_stopped(self) -> bool:
        """Whether it takes no further step in this world, as all ranks agreed."""
        return self.done or self.left

    def seated(self) -> SeatedRank:
        """The member as its events describe it."""
        return SeatedRank(**{each.name: getattr(self, each.name) for each in fields(SeatedRank)})

    def record_worker(self, worker: str, pid: int | None) -> None:
        """Record the process that has the rank; `pid` None if it is not reported."""
        self.worker, self.pid = worker, pid or self.pid

    def record_joined(self, phases_s: Mapping[str, float] | None = None) -> None:
        """Record that the rank has joined; `phases_s` None if only its step proves it."""
        self.joined = True
        if phases_s is not None:
            self.phases_s = phases_s

    def record_done(self, step: int) -> None:
        """Record that the rank has taken its last step."""
        self.done, self.last_step = True, step

    def record_left(self) -> None:
        """Record that the rank has left the world."""
        self.joined = self.left = True

    def change_partners(self, partners: tuple[str, ...]) -> None:
        """Change the partners that the rank should have; its agent has not confirmed them yet."""
        self.partners, self.partners_confirmed = partners, False

    def confirm_partners(self, partners: tuple[str, ...]) -> None:
        """Record that the rank replicates to `partners`, which may be outdated."""
        self.partners_confirmed = self.partners_confirmed or self.partners == partners

    def lose_partner(self, agent: str) -> None:
        """The address and the copies of a partner belong to a former incarnation."""
        self.partners = tuple(partner for partner in self.partners if partner != agent)


@dataclass
class AttemptWorld:
    """One formed attempt, from its orders to its end."""

    attempt: int
    shape: WorldShape
    restored_step: int
    members: Mapping[int, Member]
    joined_at: float | None = None
    first_step: int | None = None
    computed_at: float | None = None
    """Since when it evaluates its first step, if it does: the step is committed after that."""
    is_running: bool = False
    """Whether the attempt has started: until then its incident is open. A program that reports its
    steps starts with the first of them, or if it is late; another, with the last rank that joins.
    """
    is_adopted: bool = False
    """Whether it ran already under a former supervisor: its first step may be unknown."""
    store: str = ""
    """The agent whose rendezvous store the ranks meet at; "" in an adopted world."""
    placement: Placement | None = None
    """Placement of the members' partners; None in a world adopted from a former supervisor."""
    placed_at: float = 0.0
    freed: bool = False
    """Whether the agents were ordered to free copies that this world does not need."""
    program_level: int = 0
    """The highest level at which a user's program has attached."""
    commands_to_repeat: frozenset[tuple[str, CommandKind]] = frozenset()
    """(agent, command) of commands that failed and will be repeated."""

    def hosts(self) -> set[str]:
        return {member.agent for member in self.members.values()}

    def hosts_in_order(self) -> tuple[str, ...]:
        """By their lowest ranks."""
        return tuple(dict.fromkeys(self.members[rank].agent for rank in sorted(self.members)))

    def incarnations(self) -> set[AgentIncarnation]:
        return {(member.agent, member.incarnation) for member in self.members.values()}

    def forming_s(self, config: RecoveryConfig) -> float:
        """How long its ranks may take to join."""
        restores = [member.restore for member in self.members.values()]
        begins_far = config.spec.model.published is not None
        loads = any(
            r.tier is Tier.REMOTE or (r.tier is Tier.INIT and (r.uri or begins_far))
            for r in restores
        )
        timeouts = config.spec.timeouts
        return timeouts.form_s + (timeouts.load_s or 0.0 if loads else 0.0)

    def record_all_joined(self, now: float) -> None:
        self.joined_at = now

    def record_program_level(self, level: int) -> bool:
        """Returns whether no program of this world had attached at that level."""
        is_higher = level > self.program_level
        self.program_level = max(self.program_level, level)
        return is_higher

    @property
    def evaluates_first(self) -> bool:
        """Whether its first step is computed, and evaluated before it is committed."""
        return self.computed_at is not None and not self.is_running

    def record_computed(self, now: float) -> None:
        """Record that its first step is computed; only the first report counts."""
        if self.computed_at is None and self.first_step is None:
            self.computed_at = now

    def record_first_step(self, step: int) -> None:
        """Record a committed step; only the first one counts."""
        if self.first_step is None:
            self.first_step = step

    def resume(self, first_step: int | None, now: float) -> None:
        """Record that the world runs already, as an adopted world does."""
        self.joined_at, self.first_step = now, first_step
        self.is_running = self.is_adopted = True

    def record_adopted(self) -> None:
        """Record that it has made steps already: the next that is known is not its first."""
        self.is_adopted = True

    def record_running(self) -> None:
        self.is_running = True

    def counted_partners(self) -> Mapping[int, Partners]:
        """Rank → the partners that count for durability."""
        if self.placement is not None:
            return self.placement.partners
        return {rank: member.partners for rank, member in self.members.items()}

    def place(self, placement: Placement) -> None:
        """Record the present placement of the partners."""
        self.placement = placement

    def delay_freeing(self, now: float) -> None:
        """New partners begin to serve: former copies are kept until they have the state."""
        self.placed_at, self.freed = now, False

    def record_freed(self) -> None:
        self.freed = True

    def repeat_freeing(self) -> None:
        """An agent did not free its copies: all agents are ordered again."""
        self.freed = False

    def repeat_later(self, agent: str, command: CommandKind) -> None:
        """Repeat the command after the next known step."""
        self.commands_to_repeat |= {(agent, command)}

    def take_commands_to_repeat(self) -> list[tuple[str, CommandKind]]:
        taken, self.commands_to_repeat = sorted(self.commands_to_repeat), frozenset()
        return taken


@dataclass
class Worlds:
    """The present and the last world of a job, and the newest attempt announced."""

    shape: WorldShape
    """The shape of the newest world; before the first, the best shape of the job."""
    attempt: int = 0
    present: AttemptWorld | None = None
    last: AttemptWorld | None = None
    """The world before this attempt."""
    homes: Mapping[int, GroupHome] = field(default_factory=dict)
    """Group of ranks → the agent that hosts it."""
    home_incarnations: Mapping[int, str] = field(default_factory=dict)
    shapes: Mapping[int, WorldShape] = field(default_factory=dict)
    """Attempt → its shape."""

    def shape_of(self, attempt: int) -> WorldShape:
        """The shape of an attempt; of an unknown one, the newest shape."""
        return self.shapes.get(attempt, self.shape)

    def announce_attempt(self, highest: int) -> int:
        """The number of the next attempt. `highest`: the highest number that any agent knows."""
        self.attempt = max(self.attempt, highest) + 1
        return self.attempt

    def begin(self, world: AttemptWorld, roster: Roster) -> None:
        """`world` is the present world; its hosts are the homes of the groups of ranks."""
        self.present, self.attempt = world, max(self.attempt, world.attempt)
        self.shape = world.shape
        self.shapes = {**self.shapes, world.attempt: world.shape}
        leads = {index: world.members[group[0]] for index, group in enumerate(world.shape.groups)}
        self.homes = {
            index: GroupHome(lead.agent, roster.near_domain_of(lead.agent), alive=True)
            for index, lead in leads.items()
        }
        self.home_incarnations = {index: lead.incarnation for index, lead in leads.items()}

    def homes_among(self, agents: Iterable[AgentRecord]) -> dict[int, GroupHome]:
        """The homes of the groups of ranks. A home is alive if the same incarnation of its agent
        is among `agents`."""
        alive = {(record.agent, record.incarnation) for record in agents}
        return {
            index: replace(home, alive=(home.agent, self.home_incarnations[index]) in alive)
            for index, home in self.homes.items()
        }

    def end_present(self) -> None:
        """The present world, if there is one, is the last world from now on."""
        if self.present is not None:
            self.last, self.present = self.present, None

    def find_member(self, agent: str) -> Member | None:
        """A rank of the agent in the present world, or in the last one."""
        for world in (self.present, self.last):
            for member in world.members.values() if world is not None else ():
                if member.agent == agent:
                    return member
        return None

    def last_ranks(self) -> dict[str, int]:
        """Worker → its rank in the last world."""
        members = self.last.members.values() if self.last is not None else ()
        return {member.worker: member.rank for member in members if member.worker is not None}

    def restore(self, attempt: int, shapes: Mapping[int, WorldShape]) -> None:
        """Restore the newest attempt, and the shapes of all, from the journal."""
        self.attempt, self.shapes = attempt, shapes
        self.shape = shapes[max(shapes)] if shapes else self.shape
