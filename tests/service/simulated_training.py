"""Training on a small cluster in one thread: agents, workers and a network in simulated time.

It answers the recovery core's effects as real agents would: late, twice, not at all, out of
order. The faults are in `simulated_cluster`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tests.service.simulated_agent import SimAgent, SimWorker
from tests.service.simulated_network import SimulatedNetwork

from holdfast_service.recovery import effects as fx
from holdfast_service.recovery import inputs as given
from holdfast_service.registry import RemoteCheckpoint
from holdfast_service.reports import EventKind, Phase, SupervisorEvent
from holdfast_workers.messages import (
    ErrorKind,
    FormOrder,
    Seat,
    SignalKind,
    Tier,
    WorkerError,
    WorkerState,
)

STEP_S = 0.1


class SimulatedTraining(SimulatedNetwork):
    """Carries out what a recovery core asks for."""

    def kill_agent(self, name: str, back_after_s: float | None = 1.0) -> None:
        raise NotImplementedError

    # --- what the core asks for ---------------------------------------------------------------

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Emit():
                data = json.loads(json.dumps(effect.data))  # as a journal would keep it
                event = SupervisorEvent(len(self.events) + 1, self.now, effect.kind, data)
                self.events.append(event)
            case fx.End():
                self.ended = effect
            case fx.RemoveAgent():
                self._command(effect, lambda agent: self.kill_agent(agent.name))
            case fx.Fence():
                self._command(effect, lambda agent: self._fence(agent, effect.attempt))
            case fx.Form():
                self._command(effect, lambda agent: self._form(agent, effect.order))
            case fx.WarmUp():
                self._command(effect, lambda agent: agent.warm_up())
            case fx.SetPartner():
                self._command(effect, lambda agent: agent.set_partner(effect))
            case fx.FinalizeCheckpoint():
                self._command(effect, lambda agent: self._finalize(agent, effect))
            case fx.Stop():
                pass

    def _command(self, effect: Any, act: Callable[[SimAgent], None]) -> None:
        agent = self.agents[effect.agent]
        supervisor, life = self.supervisor, agent.incarnation
        name = {"FinalizeCheckpoint": "finalize_checkpoint", "SetPartner": "set_partner"}.get(
            type(effect).__name__, type(effect).__name__.lower()
        )
        attempt = getattr(effect, "attempt", 0)
        if isinstance(effect, fx.Form):
            attempt = effect.order.attempt
        step = getattr(effect, "step", 0)

        def arrive() -> None:
            if supervisor != self.supervisor:
                return  # of an older epoch: refused
            there = agent.alive and agent.reachable and agent.incarnation == life
            if there and not (isinstance(effect, fx.Form) and attempt < agent.told):
                act(agent)
            elif name == "finalize_checkpoint" or (
                agent.reachable and self.random.random() >= self.chaos
            ):
                # Otherwise the failure itself stays unknown: a deadline of the core covers it.
                failed = given.CommandFailed(agent.name, name, attempt, "gone", life, step)
                self.send(failed, 0.5)

        self.at(self.random.uniform(0.001, 0.01), arrive)

    def _fence(self, agent: SimAgent, attempt: int) -> None:
        killed = agent.fence(attempt, kill=self.random.random() < self.chaos)
        for worker in killed:
            self._exited(agent, worker, {"signal": "SIGKILL"})
        self.send(given.Fenced(agent.name, attempt, agent.report()))

    def _form(self, agent: SimAgent, order: FormOrder) -> None:
        agent.told = max(agent.told, order.attempt)
        for seat in order.seats:
            worker = agent.seat(seat, order.attempt)
            if worker is None:
                detail = {"why": "gone before it could take its rank"}
                self.signal(
                    agent,
                    SignalKind.WORKER_EXITED,
                    order.attempt,
                    rank=seat.rank,
                    worker=seat.worker,
                    detail=detail,
                )
                continue
            if agent.sticky:
                agent.sticky = False
                continue
            delay = self.random.uniform(0.01, 0.1)
            self.at(delay, lambda w=worker, s=seat: self._arrive(agent, w, s, order))

    def _arrive(self, agent: SimAgent, worker: SimWorker, seat: Seat, order: FormOrder) -> None:
        """The worker reaches the rendezvous; the last one to arrive lets all restore."""
        if not self._is_in(agent, worker, order.attempt):
            return
        world = self.worlds.setdefault(order.attempt, {})
        world[seat.rank] = (agent.name, worker.name)
        agent.restores[seat.rank] = seat.restore
        if len(world) < order.world_size:
            return
        for rank, (host, name) in sorted(world.items()):
            member = self.agents[host].workers.get(name)
            if member is None or not self._is_in(self.agents[host], member, order.attempt):
                continue
            self._restore(self.agents[host], member, rank, order.attempt)

    def _restore(self, agent: SimAgent, worker: SimWorker, rank: int, attempt: int) -> None:
        source = agent.restores[rank]
        holder = self.agents.get(source.agent)
        ok = source.tier is Tier.INIT or source.uri in self.remotes
        if holder is not None:
            ok = holder.alive and holder.take_copy(source, rank, agent)
        if not ok:
            self._failed(agent, worker, ErrorKind.RESTORE, f"no copy at {source.agent}")
            return
        worker.state, worker.step = WorkerState.TRAINING, source.step
        self.restored[attempt] = source.step
        self.signal(
            agent,
            SignalKind.WORKER_JOINED,
            attempt,
            rank=rank,
            worker=worker.name,
            pid=worker.pid,
            detail={"step": source.step, "tier": source.tier.value, "phases_s": {"restore": 0.01}},
        )
        if self._all_in(attempt, WorkerState.TRAINING):
            self.at(STEP_S, lambda: self._step(attempt, source.step + 1))

    # --- training -----------------------------------------------------------------------------

    def _members(self, attempt: int) -> list[tuple[int, SimAgent, SimWorker | None]]:
        return [
            (rank, self.agents[host], self.agents[host].workers.get(name))
            for rank, (host, name) in sorted(self.worlds[attempt].items())
        ]

    def _is_in(self, agent: SimAgent, worker: SimWorker, attempt: int) -> bool:
        there = agent.alive and agent.workers.get(worker.name) is worker
        return there and worker.attempt == attempt and worker.state is not WorkerState.PARKED

    def _all_in(self, attempt: int, state: WorkerState) -> bool:
        members = self._members(attempt)
        return len(members) == self.config.world_size and all(
            worker is not None and self._is_in(agent, worker, attempt) and worker.state is state
            for _, agent, worker in members
        )

    def _step(self, attempt: int, step: int) -> None:
        """A step commits only if every member agrees, and none of them is fenced."""
        if not self._all_in(attempt, WorkerState.TRAINING):
            return
        if step > self.config.steps:
            self._done(attempt)
            return
        if self.user_error_at == step and self.user_errors:
            self.user_errors -= 1
            for _, agent, worker in self._members(attempt):
                assert worker is not None
                self._failed(agent, worker, ErrorKind.USER, "no such luck", type_="ValueError")
            return
        self.watchdog.committed(attempt, step)
        self.committed.append((attempt, step))
        due = step == self.config.steps or (self.remote_every and step % self.remote_every == 0)
        for rank, agent, worker in self._members(attempt):
            assert worker is not None
            worker.step = step
            self.at(
                self.random.uniform(0, STEP_S / 2),
                lambda r=rank, a=agent, w=worker: self._remember(r, a, w, attempt, step),
            )
            if due:
                self.at(0.3, lambda r=rank, a=agent: self._shard(r, a, attempt, step))
        rank, agent, worker = self._members(attempt)[0]
        assert worker is not None
        if step == self.restored[attempt] + 1:
            detail = {"step": step, "at": self.now}
            for rank, agent, worker in self._members(attempt):
                self.signal(
                    agent,
                    SignalKind.FIRST_STEP,
                    attempt,
                    rank=rank,
                    worker=worker.name if worker else None,
                    detail=detail,
                )
        self.send(given.StepCommitted(attempt, step))
        self.at(STEP_S, lambda: self._step(attempt, step + 1))

    def _remember(
        self, rank: int, agent: SimAgent, worker: SimWorker, attempt: int, step: int
    ) -> None:
        if not self._is_in(agent, worker, attempt):
            return
        held = agent.commit(rank, attempt, step)
        partner = self.agents.get(agent.partners.get(rank) or "")

        def replicate() -> None:
            if agent.alive and partner is not None and partner.alive:
                partner.keep_replica(held)

        self.at(self.random.uniform(0, STEP_S / 3), replicate)

    def _shard(self, rank: int, agent: SimAgent, attempt: int, step: int) -> None:
        if self.shard_failures and agent.alive:
            self.shard_failures -= 1
            detail = {"step": step, "message": "no space left on device"}
            self.signal(agent, SignalKind.SHARD_FAILED, attempt, rank=rank, detail=detail)
        elif agent.alive and attempt == agent.told:
            record = {"rank": rank, "step": step, "attempt": attempt, "nbytes": 1}
            agent.shards.append(record)
            self.signal(agent, SignalKind.SHARD_SAVED, attempt, rank=rank, detail=record)

    def _done(self, attempt: int) -> None:
        for rank, agent, worker in self._members(attempt):
            assert worker is not None
            worker.state = WorkerState.DONE
            if attempt == agent.told and self.restored[attempt] == self.config.steps:
                self._shard(rank, agent, attempt, self.config.steps)
            detail = {"step": self.config.steps}
            self.signal(
                agent,
                SignalKind.WORKER_DONE,
                attempt,
                rank=rank,
                worker=worker.name,
                detail=detail,
            )

    def _finalize(self, agent: SimAgent, effect: fx.FinalizeCheckpoint) -> None:
        def finish() -> None:
            if not agent.alive:
                return
            uri = f"mem://{effect.step}.{effect.attempt}"
            self.remotes[uri] = RemoteCheckpoint(effect.step, effect.attempt, uri)
            agent.shards = [
                one
                for one in agent.shards
                if (one["step"], one["attempt"]) != (effect.step, effect.attempt)
            ]
            self.send(given.CheckpointFinalized(effect.step, effect.attempt, uri, 1), 0.1)

        self.at(0.2, finish)

    # --- what becomes of processes --------------------------------------------------------------

    def _boot(self, agent: SimAgent) -> None:
        life = agent.incarnation

        def ready() -> None:
            if agent.alive and agent.incarnation == life:
                agent.become_ready()
                if agent.reachable:
                    self.send(given.AgentUp(agent.report()))

        if agent.reachable:
            self.send(given.AgentUp(agent.report()))
        self.at(self.random.uniform(0.2, 1.0), ready)

    def _list_remotes(self) -> None:
        if self.ended is None:
            if self.core.phase is Phase.FINISHING:
                self.feed(given.RemoteCheckpoints(tuple(self.remotes.values())))
            self.at(5.0, self._list_remotes)

    def _exited(self, agent: SimAgent, worker: SimWorker, detail: dict[str, Any]) -> None:
        self.signal(
            agent,
            SignalKind.WORKER_EXITED,
            worker.attempt,
            rank=worker.rank,
            worker=worker.name,
            pid=worker.pid,
            detail={**detail, "step": worker.step},
        )

    def _failed(
        self,
        agent: SimAgent,
        worker: SimWorker,
        kind: ErrorKind,
        message: str,
        type_: str = "RuntimeError",
    ) -> None:
        if worker.state is WorkerState.DONE:
            return
        worker.state = WorkerState.PARKED
        worker.error = WorkerError(kind, type_, message, "Traceback: ...", worker.step)
        self.signal(
            agent,
            SignalKind.WORKER_FAILED,
            worker.attempt,
            rank=worker.rank,
            worker=worker.name,
            detail={"error": asdict(worker.error), "step": worker.step},
        )

    def told(self, kind: EventKind) -> list[dict[str, Any]]:
        """The data of every event of that kind, in order."""
        return [event.data for event in self.events if event.kind is kind]
