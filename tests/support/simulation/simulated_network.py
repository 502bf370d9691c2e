"""Simulated time, and a network that delays, repeats and loses messages between a recovery core and
its agents."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.watchdog import Watchdog

from holdfast_service.job_model.supervisor_protocol import SupervisorEvent
from holdfast_service.placement.restore_points import RemoteCheckpoint
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import FormOrder
from holdfast_workers.protocol.signals import Signal, SignalDetail

START = 1_000_000.0
STEPPING_S = 0.4
"""How long unreachable ranks continue to step; shorter than the detection of their agent's loss."""
MISSED_S = 0.5


class SimulatedNetwork:
    """Owns the core, the agents and the clock, and advances time until the job has ended."""

    def __init__(
        self,
        config: RecoveryConfig,
        seed: int = 0,
        *,
        remote_every: int = 10,
        chaos: float = 0.0,
        domains: int = 0,
    ) -> None:
        """`chaos` is the probability that a message is slow, repeated or lost."""
        self.config = config
        self.random = random.Random(seed)
        self.chaos = chaos
        self.remote_every = remote_every
        self.now = START
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.events: list[SupervisorEvent] = []
        self.ended: fx.End | None = None
        self.remotes: dict[str, RemoteCheckpoint] = {}
        self.given_back: set[str] = set()
        """Seats of an elastic job that are not on the cluster."""
        self.worlds: dict[int, dict[int, tuple[str, str]]] = {}
        self.restored: dict[int, int] = {}
        self.orders: dict[int, FormOrder] = {}
        self.committed: list[tuple[int, int]] = []
        self.step_times: list[tuple[int, int, float]] = []
        """(attempt, step, when)"""
        self.user_error_at: int | None = None
        self.not_finite_at: int | None = None
        self.poisoned: set[tuple[str, int]] = set()
        """Saved states, as (place or tier, step), that give no finite step."""
        self.user_errors = 1000
        """How often the recipe raises when it gets to `user_error_at`."""
        self.evaluation_s: Mapping[int, float] = {}
        """Step → how long its evaluation lasts; the step is committed after that."""
        self.fail_evaluation: Callable[[int, int], bool] = lambda attempt, step: False
        """Lets the evaluation of (attempt, step) fail at its end, if it returns true."""
        self.evaluated: set[tuple[int, int]] = set()
        """The evaluations, as (attempt, step), that have ended."""
        self.early_at: Mapping[int, int] = {}
        """World size → the step after which its ranks decide to end early."""
        self.decided: set[tuple[int, int]] = set()
        """States, as (attempt, step), that are the last by such a decision."""
        self.shard_failures = 0
        self.completions: list[commands.SaveShard] = []
        self.checks: list[str] = []
        self.orders_wanted: dict[type[inputs.Input], inputs.Input] = {}
        """Kind of order -> as the control plane wants it; and as the supervisor has taken it."""
        self.orders_taken: dict[type[inputs.Input], inputs.Input] = {}
        self.observers: list[Callable[[fx.Effect], object]] = []
        """Called with every effect before it is carried out."""
        self.supervisor = 1
        self.watchdog = Watchdog(config)
        count = config.best_shape.nodes + config.spec.resources.standby_nodes
        names = [f"n{i}" for i in range(count)]
        self.agents = {
            name: SimAgent(name, config, domain=f"d{i % domains}" if domains else "")
            for i, name in enumerate(names)
        }
        self.core = RecoveryCore(config, self.now)
        for agent in self.agents.values():
            self._boot(agent)
        self._list_remotes()

    # --- time and messages --------------------------------------------------------------------

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` `seconds` from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), act))

    def run(self, limit_s: float = 5000.0) -> fx.End:
        """Advance time until the job ends."""
        end = self.now + limit_s
        while self.ended is None:
            self._advance()
            if self.now > end:
                raise AssertionError(f"not ended after {limit_s} s: {self.core.stage}")
        return self.ended

    def run_until(self, met: Callable[[], bool], limit_s: float = 1000.0) -> None:
        end = self.now + limit_s
        while not met():
            self._advance()
            assert self.now <= end, f"the condition was not met; {self.core.stage}"

    def _advance(self) -> None:
        deadline = self.core.next_deadline()
        upcoming = self._queue[0][0] if self._queue else None
        if deadline is not None and (upcoming is None or deadline <= upcoming):
            self.now = max(self.now, deadline)
            self.feed(inputs.Tick())
            return
        assert upcoming is not None, f"no event is left; {self.core.stage}"
        self.now, _, act = heapq.heappop(self._queue)
        act()

    def feed(self, value: inputs.Input) -> None:
        """Pass an input to the core now, and execute the returned effects."""
        if self.ended is not None:
            assert self.core.handle(value, self.now) == (), "effects after the end"
            return
        self._grant_leases()
        if isinstance(value, inputs.SizeOrdered | inputs.NodesAvoided):
            self.orders_taken[type(value)] = value
        effects = self.core.handle(value, self.now)
        self.watchdog.check(self.core, value, effects, self.now)
        for effect in effects:
            for observe in self.observers:
                observe(effect)
            self._carry_out(effect)

    def send(self, value: inputs.Input, slowest_s: float = 0.02) -> None:
        """Pass an input to the core after a network delay; with chaos, late or twice."""
        supervisor = self.supervisor

        def deliver() -> None:
            if supervisor == self.supervisor or isinstance(value, inputs.Signals):
                self.feed(value)

        self.at(self.random.uniform(0, slowest_s), deliver)
        if self.random.random() < self.chaos:
            self.at(self.random.uniform(0, 3.0), deliver)

    def signal(self, agent: SimAgent, detail: SignalDetail, attempt: int, **fields: Any) -> None:
        agent.signals += 1
        signal = Signal(
            detail=detail,
            agent=agent.name,
            incarnation=agent.incarnation,
            seq=agent.signals,
            at=self.now,
            attempt=attempt,
            **fields,
        )
        if agent.loses_signals:
            return
        if agent.reachable:
            slow = 1.5 if self.random.random() < self.chaos else 0.02
            self.send(inputs.Signals((signal,)), slow)
        else:
            agent.unsent.append(signal)

    def _grant_leases(self) -> None:
        """Grant a lease for the newest attempt to every reachable agent."""
        for agent in self.agents.values():
            if agent.alive and agent.reachable and agent.beats:
                agent.granted[self.core.attempt] = self.now + STEPPING_S

    def _may_step(self, agent: SimAgent, attempt: int) -> bool:
        self._grant_leases()
        return not self.config.spec.recovery.lease_s or self.now <= agent.granted.get(attempt, -1.0)

    def _supervisor_ended(self, agent: SimAgent) -> None:
        """The agent knows its supervisor to have ended: its ranks may step until a new supervisor
        arrives."""
        attempt = self.core.attempt
        if agent.alive and agent.reachable and self.now <= agent.granted.get(attempt, -1.0):
            agent.granted[attempt] = self.now + self.config.spec.recovery.lease_s

    def _announce_agent(self, agent: SimAgent) -> None:
        """A supervisor reaches the agent, if possible: leases are short from now on."""
        if agent.alive and agent.reachable:
            for attempt, until in agent.granted.items():
                agent.granted[attempt] = min(until, self.now + STEPPING_S)
            self.send(inputs.AgentUp(agent.report()))
            if not agent.beats:
                self._notice_silence(agent, MISSED_S)

    def _notice_silence(self, agent: SimAgent, after_s: float) -> None:
        """The present supervisor misses the agent's heartbeats, if they do not begin before. A
        later supervisor counts from when it reached the agent."""
        supervisor, life, silence = self.supervisor, agent.incarnation, agent.silences

        def notice() -> None:
            same = (supervisor, life, silence) == (
                self.supervisor,
                agent.incarnation,
                agent.silences,
            )
            if same and agent.alive and not agent.beats:
                agent.counts_as_lost = True
                lost = inputs.AgentLost(agent.name, "no heartbeat", incarnation=life, certain=False)
                self.feed(lost)
                self._send_lease_end(agent.name, life, 0.0)

        self.at(after_s, notice)

    def _send_lease_end(self, name: str, life: str, in_s: float | None) -> None:
        """Report the end of a lease, like the supervisor's agent watch."""
        supervisor = self.supervisor

        def tell() -> None:
            if supervisor == self.supervisor:
                self.feed(inputs.LeaseEnded(name, life))

        if self.config.lapse_s is not None and in_s is not None:
            self.at(in_s, tell)

    def _carry_out(self, effect: fx.Effect) -> None:
        raise NotImplementedError

    def _boot(self, agent: SimAgent) -> None:
        raise NotImplementedError

    def _list_remotes(self) -> None:
        raise NotImplementedError
