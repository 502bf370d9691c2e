"""A million random signals through policy and recovery core: none breaks an invariant.

The other histories use a well-behaved cluster. Here signals are arbitrary: of past incarnations and
attempts, repeated, of workers that never existed, between any two answers. Agents of the simulated
cluster answer the effects, or do not. The seed is printed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.support.simulation.core_config import core_config
from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.watchdog import Watchdog

from holdfast_service.job_model.events.incidents import IncidentClosedEvent
from holdfast_service.placement.world_shape import WorldShape
from holdfast_service.policy.causes import within_window
from holdfast_service.policy.decision_ladder import Action
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.findings import ReplicaFinding
from holdfast_workers.protocol.messages import Beat, ErrorKind, ErrorReport, Tier
from holdfast_workers.protocol.signals import (
    FirstStep,
    PartnerLost,
    RankStalled,
    ShardDelayed,
    ShardFailed,
    Signal,
    SignalDetail,
    SignalKind,
    StepRecomputed,
    StoreLost,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerJoined,
    ZygoteLost,
)

SIGNALS = 250_000
SEEDS = (20_263, 20_261, 20_262, 20_264)
"""Each sends `SIGNALS` signals: a million in total."""
FIRST_SIGNALS = 100_000
TYPES = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
MESH = {"dp_shard": 2, "tp": 2}
ENDINGS = tuple(WorkerExited(exit_code=code) for code in (1, 3)) + tuple(
    WorkerExited(name=name) for name in ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGBUS")
)
KINDS = (
    *(SignalKind.WORKER_EXITED, SignalKind.WORKER_FAILED) * 2,
    *(SignalKind.WORKER_JOINED, SignalKind.FIRST_STEP, SignalKind.WORKER_DONE) * 3,
    SignalKind.PARTNER_LOST,
    SignalKind.ZYGOTE_LOST,
    SignalKind.SHARD_DELAYED,
    SignalKind.SHARD_FAILED,
    SignalKind.RANK_STALLED,
    SignalKind.RECOMPUTED,
)


def config(rng: random.Random) -> RecoveryConfig:
    return core_config(
        (WorldShape.of(MESH, 2),),
        standby_nodes=rng.randint(0, 2),
        steps=1_000_000,
        remote={"every_steps": 1000},
        max_failures=rng.choice((0, 3, 20, 10_000, 10_000)),
        max_preemptions=rng.choice((0, 5, 1000)),
        max_without_progress=rng.choice((2, 5, 1000, 1000)),
        window_s=rng.choice((10.0, 3600.0)),
    )


class RandomJob:
    """A job from its start to its end, or to the maximum number of signals."""

    def __init__(self, rng: random.Random) -> None:
        self.random = rng
        self.config = config(rng)
        self.now = 1_000_000.0
        self.core = RecoveryCore(self.config, self.now)
        self.watchdog = Watchdog(self.config)
        count = self.config.best_shape.nodes + self.config.spec.resources.standby_nodes
        self.agents = {f"n{at}": SimAgent(f"n{at}", self.config) for at in range(count)}
        self.pending: list[fx.Effect] = []
        self.attempt = 0
        self.step = 0
        self.signals = 0
        self.decisions: Counter[str] = Counter()
        self.seats: dict[int, tuple[SimAgent, str]] = {}
        """Rank → (agent, worker) in the newest attempt; former worker names are in `past`."""
        self.past: list[str] = ["n0.i1.1"]
        self.ends: list[fx.End] = []
        self.feed(inputs.RemoteCheckpoints(()))
        for agent in self.agents.values():
            agent.become_ready()
            self.feed(inputs.AgentUp(agent.report()))

    # --- effects and their answers ----------------------------------------------------------------

    def feed(self, value: inputs.Input) -> None:
        effects = self.core.handle(value, self.now)
        self.watchdog.check(self.core, value, effects, self.now)
        for effect in effects:
            if isinstance(effect, fx.Emit):
                self._check_incident(effect)
            elif isinstance(effect, fx.End):
                self.ends.append(effect)
            else:
                self.pending.append(effect)
        if self.core.stage is Stage.ENDED:
            assert self.core.handle(inputs.Tick(), self.now + 1e6) == ()
        assert self.core.attempt >= self.attempt, "attempts only grow"
        self.attempt = self.core.attempt
        if self.core.stage is Stage.RUNNING:
            self._check_budget()

    def _check_incident(self, effect: fx.Emit) -> None:
        if not isinstance(effect.event, IncidentClosedEvent):
            return
        incident = effect.event.record
        if incident.budget is None:  # the job ended, or committed a step, before a decision
            return
        assert incident.decision in set(Action) and incident.reason
        self.decisions[incident.decision] += 1
        assert all(refused.why and refused.decision in set(Action) for refused in incident.refused)
        if incident.decision != Action.WAIT:
            named = {refused.decision for refused in incident.refused} | {incident.decision}
            assert named == set(Action), "all other actions are refused with a reason"

    def _check_budget(self) -> None:
        state, limits = self.core.state, self.config.spec.recovery
        failures = within_window(state.budget.failures, self.now, limits.window_s)
        assert len(failures) <= limits.max_failures
        assert state.progress.without_progress <= limits.max_without_progress

    def answer(self) -> None:
        """The oldest pending command succeeds, fails, or stays unanswered."""
        if not self.pending:
            return
        effect = self.pending.pop(0)
        name = getattr(effect, "agent", None)
        agent = self.agents.get(name) if name is not None else None
        if agent is None or self.random.random() < 0.02:
            return
        match effect:
            case commands.Fence() if agent.alive and effect.incarnation == agent.incarnation:
                agent.fence(effect.attempt, kill=False)
                agent.warm_up()
                self.feed(inputs.Fenced(agent.name, effect.attempt, agent.report()))
            case commands.Form() if agent.alive and effect.attempt >= agent.known_attempt:
                self._form(agent, effect)
            case fx.RemoveAgent():
                self.restart(agent)
            case commands.Fence() | commands.Form():
                why = inputs.CommandFailed(
                    agent.name,
                    effect.kind,
                    effect.attempt,
                    "no",
                    effect.incarnation,
                )
                self.feed(why)

    def _form(self, agent: SimAgent, effect: commands.Form) -> None:
        agent.known_attempt = effect.attempt
        self.step = effect.order.seats[0].restore.step
        for seat in effect.order.seats:
            worker = agent.seat(seat, effect.attempt)
            if worker is None:
                continue
            self.seats[seat.rank] = (agent, worker.name)
            self.send(
                self.signal(SignalKind.WORKER_JOINED, agent, seat.rank, worker.name, self.attempt)
            )

    def restart(self, agent: SimAgent) -> None:
        life = agent.incarnation
        agent.die()
        certain = self.random.random() < 0.8
        self.feed(inputs.AgentLost(agent.name, "gone", incarnation=life, certain=certain))
        agent.start_again()
        agent.become_ready()
        self.feed(inputs.AgentUp(agent.report()))

    def commit(self) -> None:
        """Commit a step of the newest world if all its workers live; every rank keeps its state."""
        members = [(rank, *seat) for rank, seat in self.seats.items()]
        there = all(
            agent.alive and name in agent.workers and agent.workers[name].attempt == self.attempt
            for _, agent, name in members
        )
        if not there or len(members) < 4 or self.core.stage not in (Stage.FORMING, Stage.RUNNING):
            return
        self.step += 1
        self.watchdog.committed(self.attempt, self.step)
        for rank, agent, _ in members:
            held = agent.commit(rank, self.attempt, self.step)
            for partner in agent.partners.get(rank, ()):
                self.agents[partner].keep_replica(held)
        self.feed(inputs.StepCommitted(self.attempt, self.step, self.step))

    # --- signals ----------------------------------------------------------------------------------

    def send_noise(self, count: int) -> None:
        """Send arbitrary signals."""
        self.send(*(self._any_signal() for _ in range(count)))

    def send(self, *signals: Signal) -> None:
        self.signals += len(signals)
        for signal in signals:
            if signal.kind is SignalKind.WORKER_EXITED:
                for agent in self.agents.values():
                    agent.workers.pop(signal.worker or "", None)
        self.feed(inputs.Signals(signals))

    def signal(
        self, kind: SignalKind, agent: SimAgent, rank: int, worker: str, attempt: int
    ) -> Signal:
        return Signal(
            detail=self._detail(kind, rank, worker, attempt),
            agent=agent.name,
            incarnation=agent.incarnation,
            seq=0,
            at=self.now,
            attempt=attempt,
            rank=rank,
            worker=worker,
            pid=1,
        )

    def _any_signal(self) -> Signal:
        rng = self.random
        rank = rng.randrange(4)
        kind = rng.choice(KINDS)
        agent, worker = self.seats.get(rank, (self.agents["n0"], "n0.i1.1"))
        attempt = self.attempt
        draw = rng.random()
        if draw < 0.85 or kind is SignalKind.FIRST_STEP:  # from a past attempt
            attempt = max(0, attempt - rng.randint(1, 3))
            worker = rng.choice(self.past)
        elif draw < 0.88:
            agent = rng.choice(list(self.agents.values()))
        elif kind is SignalKind.WORKER_EXITED:
            self.past.append(worker)
        return self.signal(kind, agent, rank, worker, attempt)

    def _detail(  # noqa: PLR0911  (one for each kind)
        self, kind: SignalKind, rank: int, worker: str, attempt: int
    ) -> SignalDetail:
        rng = self.random
        match kind:
            case SignalKind.WORKER_EXITED:
                short = "0 MiB available" if rng.random() < 0.1 else ""
                return replace(rng.choice(ENDINGS), step=self.step, out_of_memory=short)
            case SignalKind.WORKER_FAILED:
                error = ErrorReport(
                    kind=rng.choice(list(ErrorKind)),
                    type=f"{rng.choice(TYPES)}Error",
                    message=f"no {rng.randrange(3)}",
                    traceback="Traceback",
                    step=self.step + rng.randint(0, 1),
                )
                return WorkerFailed(error, finding=self._finding())
            case SignalKind.WORKER_JOINED:
                return WorkerJoined(self.step, Tier.OWN_RAM)
            case SignalKind.FIRST_STEP:
                return FirstStep(self.step, self.now)
            case SignalKind.WORKER_DONE:
                return WorkerDone(self.step)
            case SignalKind.RECOMPUTED:
                return StepRecomputed(self.step, tuple(rng.choices("ab", k=4)))
            case SignalKind.PARTNER_LOST:
                return PartnerLost(rng.choice(list(self.agents)), "reset")
            case SignalKind.ZYGOTE_LOST:
                return ZygoteLost()
            case SignalKind.STORE_LOST:
                return StoreLost(rng.choice((0, 2001, 2002)))
            case SignalKind.SHARD_DELAYED:
                return ShardDelayed(self.step, "no")
            case SignalKind.SHARD_FAILED:
                return ShardFailed(self.step, "no")
            case _:
                return RankStalled(
                    Beat(rank, worker, 1, attempt, self.step, "forward", 0, 9.0, 1.0)
                )

    def _finding(self) -> ReplicaFinding:
        """A random finding about replicas; the core reads it only with an error of its kind."""
        differ = self.random.random() < 0.8
        return ReplicaFinding(
            attempt=self.attempt,
            step=self.step,
            bad_from=self.step,
            groups=((0, 2), (1, 3)) if differ else (),
            digests={0: "a", 2: "b", 1: "a", 3: self.random.choice("ab")} if differ else {},
            changed=() if differ else (1,),
        )


def play(job: RandomJob, max_signals: int) -> None:
    """Continue until the job has ended or `max_signals` signals were sent."""
    rng = job.random
    while job.core.stage is not Stage.ENDED and job.signals < max_signals:
        for _ in range(rng.randint(1, 6)):
            job.answer()
        job.now += rng.random() * 0.1
        job.commit()
        job.send_noise(rng.randint(5, 60))
        if rng.random() < 0.02:
            job.restart(rng.choice(list(job.agents.values())))
        deadline = job.core.next_deadline()
        waits = job.core.stage not in (Stage.RUNNING, Stage.FINISHING)
        if deadline is not None and waits and (not job.pending or rng.random() < 0.1):
            job.now = max(job.now, deadline)
            job.feed(inputs.Tick())


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("seed", "signals"),
    [
        (SEEDS[0], FIRST_SIGNALS),
        pytest.param(SEEDS[0], SIGNALS, marks=pytest.mark.slow),
        *(pytest.param(seed, SIGNALS, marks=pytest.mark.soak) for seed in SEEDS[1:]),
    ],
)
def test_random_signals_break_no_invariant(seed: int, signals: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sent, jobs = 0, 0
    endings: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    while sent < signals:
        job = RandomJob(rng)
        play(job, 20_000)
        sent += job.signals
        jobs += 1
        decisions += job.decisions
        if job.core.stage is Stage.ENDED:
            (end,) = job.ends
            assert end.code and end.message
            endings[end.code] += 1
        else:
            endings["goes on"] += 1
    print(f"{sent} signals in {jobs} jobs; {dict(endings)}; {dict(decisions)}")
    assert set(decisions) >= {"re-form in place", "replace the worker", "replace the node", "stop"}
    assert {"too_many_failures", "no_progress", "user_error", "out_of_memory"} <= set(endings)
