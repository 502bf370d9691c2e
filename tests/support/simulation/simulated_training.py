"""Training on a small cluster in one thread: agents, workers and a network in simulated time.

It answers the effects of the recovery core like real agents: late, twice, never, or out of order.
`simulated_cluster` adds the faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.support.simulation.simulated_agent import EARLY, SimAgent, SimWorker
from tests.support.simulation.simulated_network import MISSED_S, SimulatedNetwork

from holdfast_service.job_model.events.codec import numbered
from holdfast_service.job_model.supervisor_protocol import EventKind, Phase
from holdfast_service.placement.restore_points import RemoteCheckpoint, sizes
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_workers.memory.segment_store import mesh_tag
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.commands import CommandKind
from holdfast_workers.protocol.messages import (
    ErrorKind,
    ErrorReport,
    FormOrder,
    Place,
    Seat,
    Tier,
    WorkerState,
)
from holdfast_workers.protocol.signals import (
    FailedShard,
    FirstStep,
    RetentionDone,
    ShardFailed,
    ShardRecord,
    ShardSaved,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)
from holdfast_workers.state.replicas import payload_groups

STEP_S = 0.1
HOLD_S = 0.25


class SimulatedTraining(SimulatedNetwork):
    """Executes the effects of a recovery core."""

    publishes = True
    """Whether agents write the manifests of checkpoints."""
    leaves = True
    """Whether ranks leave for a change of the mesh; otherwise their partners hold no state."""
    save_s = 0.3
    """How long the saver of a shard runs."""
    tidies = True
    """Whether agents clean up the remote tier."""

    def _remove(self, life: str, agent: SimAgent) -> None:
        raise NotImplementedError

    def keep_seats(self, seats: frozenset[str] | None) -> None:
        raise NotImplementedError

    # --- effects of the core ------------------------------------------------------------------

    def _carry_out(self, effect: fx.Effect) -> None:  # noqa: PLR0912  (one per kind)
        match effect:
            case fx.Emit():
                event = numbered(len(self.events) + 1, self.now, effect.event)
                data = json.loads(json.dumps(event.data))  # like a journal
                self.events.append(replace(event, data=data))
            case fx.End():
                self.ended = effect
            case fx.KeepSeats():
                self.keep_seats(effect.seats)
            case fx.RemoveAgent():
                self._command(effect, partial(self._remove, effect.incarnation))
                self._send_lease_end(effect.agent, effect.incarnation, MISSED_S)
            case commands.Fence():
                self._command(effect, lambda agent: self._fence(agent, effect.attempt))
            case commands.Form():
                self._command(effect, lambda agent: self._form(agent, effect.order))
            case commands.WarmUp() | commands.CheckNode():
                self._command(effect, lambda agent: self._handle_standby_command(agent, effect))
            case commands.SetPartners():
                self._command(effect, lambda agent: self._set_partners(agent, effect))
            case commands.FreeMemory():
                self._command(effect, lambda agent: agent.free(effect))
            case commands.Finish():
                self._command(effect, lambda agent: agent.request_stop(effect.attempt))
            case commands.PrepareMesh():
                self._command(effect, lambda agent: self._prepare(agent, effect))
            case commands.Leave():
                self._command(effect, lambda agent: agent.request_leave(effect.attempt))
            case commands.SaveShard():
                self.completions.append(effect)
                self._command(effect, lambda agent: self._save_held(agent, effect))
            case commands.FinalizeCheckpoint() | commands.TidyRemoteTier():
                self._command(effect, lambda agent: self._handle_remote_command(agent, effect))
            case commands.SetIntervals() | commands.Stop():
                pass  # `remote_every` determines the saves of the simulation

    def _command(self, effect: Any, act: Callable[[SimAgent], None]) -> None:
        agent = self.agents[effect.agent]
        supervisor, life = self.supervisor, agent.incarnation
        name: CommandKind | None = getattr(effect, "kind", None)  # None: it is no command
        attempt = getattr(effect, "attempt", 0)
        step = getattr(effect, "step", 0)

        def arrive() -> None:
            if supervisor != self.supervisor:
                return  # an older epoch: refused
            there = agent.alive and agent.reachable and agent.incarnation == life
            if name is not None and name in agent.refused:
                agent.refused.discard(name)
                self.send(inputs.CommandFailed(agent.name, name, attempt, "timed out", life, step))
            elif there and not (
                isinstance(effect, commands.Form) and attempt < agent.known_attempt
            ):
                act(agent)
            elif (
                name is CommandKind.FINALIZE_CHECKPOINT
                or (agent.reachable and self.random.random() >= self.chaos)
            ) and name is not None:
                # Otherwise even the failure stays unknown: a deadline of the core covers it.
                failed = inputs.CommandFailed(agent.name, name, attempt, "gone", life, step)
                self.send(failed, 0.5)

        self.at(self.random.uniform(0.001, 0.01), arrive)

    def _fence(self, agent: SimAgent, attempt: int) -> None:
        killed = agent.fence(attempt, kill=self.random.random() < self.chaos)
        for worker in killed:
            self._exited(agent, worker, WorkerExited(name="SIGKILL"))
        self.send(inputs.Fenced(agent.name, attempt, agent.report()))

    def _handle_standby_command(
        self, agent: SimAgent, effect: commands.WarmUp | commands.CheckNode
    ) -> None:
        if isinstance(effect, commands.WarmUp):
            agent.warm_up()
        else:
            self.checks.append(agent.name)
            self.send(inputs.NodeChecked(agent.report()), 1.0)

    def _set_partners(self, agent: SimAgent, effect: commands.SetPartners) -> None:
        agent.set_partners(effect)
        names = tuple(partner.agent for partner in effect.partners)
        life = agent.incarnation
        self.send(inputs.PartnersSet(agent.name, effect.attempt, effect.rank, names, life))

    def _prepare(self, agent: SimAgent, effect: commands.PrepareMesh) -> None:
        if agent.known_attempt > effect.attempt:
            return
        for rank in effect.ranks:
            agent.prepare((mesh_tag(effect.mesh), rank))
        self.send(inputs.MeshPrepared(agent.name, effect.attempt), 0.1)

    def _form(self, agent: SimAgent, order: FormOrder) -> None:
        agent.known_attempt = max(agent.known_attempt, order.attempt)
        agent.mesh = order.mesh
        seated = {seat.worker for seat in order.seats}
        for name in [w.name for w in agent.workers.values() if w.rank is not None or w.bound]:
            if name not in seated:
                del agent.workers[name]
        self.orders[order.attempt] = order
        for seat in order.seats:
            worker = agent.seat(seat, order.attempt)
            if worker is None:
                gone = WorkerExited(why="gone before it could take its rank")
                self.signal(agent, gone, order.attempt, rank=seat.rank, worker=seat.worker)
                continue
            place = (mesh_tag(order.mesh), seat.rank)
            assert worker.bound in (None, place), f"{worker.name} cannot move to {place}"
            worker.bound = place
            if agent.loses_next_worker:
                agent.loses_next_worker = False
                continue
            delay = self.random.uniform(0.01, 0.1)
            self.at(delay, partial(self._arrive, agent, worker, seat, order))

    def _arrive(self, agent: SimAgent, worker: SimWorker, seat: Seat, order: FormOrder) -> None:
        """The worker reaches the rendezvous; when the last worker arrives, all restore."""
        if not self._is_in(agent, worker, order.attempt):
            return
        store = self.agents[order.store_host]
        if store.alive and store.store_port != order.store_port:
            self.fail_worker(agent, worker, ErrorKind.COMMUNICATION, "connection refused")
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
        if source.tier is Tier.RESHARD:
            there = {
                origin.rank
                for origin in source.origins
                if self.agents[origin.agent].holds(origin, source)
            }
            groups = payload_groups(sizes(source.mesh), self.config.replica_equality)
            ok = all(there & set(ranks) for ranks in groups)
            if ok:
                agent.keep_resharded(rank, source)
        if holder is not None:
            ok = holder.alive and holder.take_copy(source, rank, agent)
        if not ok:
            self.fail_worker(agent, worker, ErrorKind.RESTORE, f"no copy at {source.agent}")
            return
        worker.state, worker.step = WorkerState.TRAINING, source.step
        worker.evaluates_first = False
        self.restored[attempt] = source.step
        stored = self.remotes.get(source.uri)
        if (source.attempt if stored is None else stored.attempt, source.step) in self.decided:
            self.decided.add((attempt, source.step))
        self.signal(
            agent,
            WorkerJoined(source.step, source.tier, {"restore": 0.01}),
            attempt,
            rank=rank,
            worker=worker.name,
            pid=worker.pid,
        )
        if self._all_in(attempt, WorkerState.TRAINING):
            if source.step == self.config.spec.train.steps or (
                (attempt, source.step) in self.decided
            ):
                self.at(STEP_S, lambda: self._done(attempt, source.step))
            else:
                self.at(STEP_S, lambda: self._step(attempt, source.step + 1))

    # --- training -----------------------------------------------------------------------------

    def members_of(self, attempt: int) -> list[tuple[int, SimAgent, SimWorker | None]]:
        return [
            (rank, self.agents[host], self.agents[host].workers.get(name))
            for rank, (host, name) in sorted(self.worlds[attempt].items())
        ]

    def _is_in(self, agent: SimAgent, worker: SimWorker, attempt: int) -> bool:
        there = agent.alive and agent.workers.get(worker.name) is worker
        return there and worker.attempt == attempt and worker.state is not WorkerState.PARKED

    def _all_in(self, attempt: int, state: WorkerState) -> bool:
        members = self.members_of(attempt)
        return len(members) == self.orders[attempt].world_size and all(
            worker is not None and self._is_in(agent, worker, attempt) and worker.state is state
            for _, agent, worker in members
        )

    def _evaluate(self, attempt: int, step: int) -> None:
        """Report the first step of the attempt; the evaluation of any step lasts, or fails."""
        if step == self.restored[attempt] + 1:
            for rank, agent, worker in self.members_of(attempt):
                assert worker is not None
                worker.evaluates_first = True
                first = FirstStep(step, self.now, committed=False)
                self.signal(agent, first, attempt, rank=rank, worker=worker.name)

        def end() -> None:
            if not self._all_in(attempt, WorkerState.TRAINING):
                return
            self.evaluated.add((attempt, step))
            if not self.fail_evaluation(attempt, step):
                self._step(attempt, step)

        self.at(self.evaluation_s[step], end)

    def _step(self, attempt: int, step: int) -> None:  # noqa: PLR0912  (one per outcome)
        """Commit a step, if every member agrees and no member is fenced."""
        if not self._all_in(attempt, WorkerState.TRAINING):
            return
        if not all(self._may_step(agent, attempt) for _, agent, _ in self.members_of(attempt)):
            self.at(HOLD_S, lambda: self._step(attempt, step))
            return
        poisoned = step == self.restored[attempt] + 1 and self._restored_poisoned_state(attempt)
        if poisoned or step == self.not_finite_at:
            for _, agent, worker in self.members_of(attempt):
                assert worker is not None
                self.fail_worker(agent, worker, ErrorKind.NOT_FINITE, "loss nan", "NonFiniteStep")
            return
        if self.user_error_at == step and self.user_errors:
            self.user_errors -= 1
            for _, agent, worker in self.members_of(attempt):
                assert worker is not None
                self.fail_worker(agent, worker, ErrorKind.USER, "no such luck", type_="ValueError")
            return
        if step in self.evaluation_s and (attempt, step) not in self.evaluated:
            self._evaluate(attempt, step)
            return
        for _, _, worker in self.members_of(attempt):
            assert worker is not None
            worker.evaluates_first = False
        self.watchdog.committed(attempt, step)
        self.committed.append((attempt, step))
        self.step_times.append((attempt, step, self.now))
        wished = any(attempt in agent.to_finish for _, agent, _ in self.members_of(attempt))
        ends = step == self.config.spec.train.steps
        if step == self.early_at.get(len(self.members_of(attempt))) and not ends:
            self.decided.add((attempt, step))
        last = ends or wished or (attempt, step) in self.decided
        planned = self.orders[attempt].leave_after
        leaves = (
            self.leaves
            and not last
            and (
                any(attempt in agent.to_leave for _, agent, _ in self.members_of(attempt))
                or (planned is not None and step >= planned)
            )
        )
        due = last or (self.remote_every and step % self.remote_every == 0)
        for rank, agent, worker in self.members_of(attempt):
            assert worker is not None
            worker.step = step
            self.at(
                self.random.uniform(0, STEP_S / 2),
                partial(self._keep_state, rank, agent, worker, attempt, step),
            )
            if due:
                self._start_saver(rank, agent, attempt, step)
        rank, agent, worker = self.members_of(attempt)[0]
        assert worker is not None
        if step == self.restored[attempt] + 1:
            for rank, agent, worker in self.members_of(attempt):
                self.signal(
                    agent,
                    FirstStep(step, self.now),
                    attempt,
                    rank=rank,
                    worker=worker.name if worker else None,
                )
        self.send(inputs.StepCommitted(attempt, step, self._protected(attempt)))
        if last:
            self.at(STEP_S, lambda: self._done(attempt, step))
        elif leaves:
            self.at(STEP_S, lambda: self._leave(attempt, step))
        else:
            self.at(STEP_S, lambda: self._step(attempt, step + 1))

    def _restored_poisoned_state(self, attempt: int) -> bool:
        """Whether a rank of the attempt restored a state that gives no finite step."""
        return any(
            (restore.place if restore.agent else restore.tier, restore.step) in self.poisoned
            for restore in (agent.restores[rank] for rank, agent, _ in self.members_of(attempt))
        )

    def _keep_state(
        self, rank: int, agent: SimAgent, worker: SimWorker, attempt: int, step: int
    ) -> None:
        if not self._is_in(agent, worker, attempt):
            return
        held = agent.commit(rank, attempt, step)

        def replicate(partner: SimAgent) -> None:
            if agent.alive and partner.alive and partner.name not in agent.broken:
                partner.keep_replica(held)

        for name in agent.partners.get(rank, ()):
            partner = self.agents[name]
            self.at(self.random.uniform(0, STEP_S / 3), partial(replicate, partner))

    def _protected(self, attempt: int) -> int:
        """The newest step that the partners of every rank hold."""
        newest: list[int] = []
        for rank, agent, _ in self.members_of(attempt):
            partners = [self.agents[name] for name in agent.partners.get(rank, ())]
            newest.append(agent.newest(Place.OWN, rank, attempt))
            newest.extend(
                partner.newest(Place.REPLICA, rank, attempt) if partner.alive else -1
                for partner in partners
            )
        return min(newest)

    def _start_saver(self, rank: int, agent: SimAgent, attempt: int, step: int) -> None:
        agent.saving.add((rank, attempt, step))
        self.at(self.save_s, lambda: self._finish_shard(rank, agent, attempt, step))

    def _save_held(self, agent: SimAgent, effect: commands.SaveShard) -> None:
        if agent.may_save(effect):
            self._start_saver(effect.rank, agent, effect.attempt, effect.step)

    def _finish_shard(self, rank: int, agent: SimAgent, attempt: int, step: int) -> None:
        """The saver has ended. A save outlives its attempt, but not its agent."""
        if (rank, attempt, step) not in agent.saving:
            return
        agent.saving.remove((rank, attempt, step))
        if self.shard_failures:
            self.shard_failures -= 1
            message = "no space left on device"
            failed = FailedShard(step, message, rank=rank, attempt=attempt)
            agent.failed_shards.append(failed)
            self.signal(agent, ShardFailed(step, message), attempt, rank=rank)
        else:
            record = ShardRecord(rank, step, attempt, nbytes=1)
            agent.shards.append(record)
            self.signal(agent, ShardSaved(record), attempt, rank=rank)

    def _done(self, attempt: int, step: int) -> None:
        if not self._all_in(attempt, WorkerState.TRAINING):
            return
        for rank, agent, worker in self.members_of(attempt):
            assert worker is not None
            worker.state = WorkerState.DONE
            worker.early = EARLY if (attempt, step) in self.decided else None
            if attempt == agent.known_attempt and self.restored[attempt] == step:
                self._start_saver(rank, agent, attempt, step)
            done = WorkerDone(step, worker.early)
            self.signal(agent, done, attempt, rank=rank, worker=worker.name)

    def _leave(self, attempt: int, step: int) -> None:
        """All ranks leave after the step, so that the mesh can change."""
        if not self._all_in(attempt, WorkerState.TRAINING):
            return
        for rank, agent, worker in self.members_of(attempt):
            assert worker is not None
            worker.state = WorkerState.LEFT
            self.signal(agent, WorkerLeft(step), attempt, rank=rank, worker=worker.name)

    def _finalize(self, agent: SimAgent, effect: commands.FinalizeCheckpoint) -> None:
        def finish() -> None:
            if not agent.alive:
                return
            uri = f"mem://{effect.step}.{effect.attempt}"
            self.remotes[uri] = RemoteCheckpoint(effect.step, effect.attempt, uri)
            agent.shards = [
                shard
                for shard in agent.shards
                if (shard.step, shard.attempt) != (effect.step, effect.attempt)
            ]
            self.send(inputs.CheckpointFinalized(effect.step, effect.attempt, uri, 1), 0.1)

        self.at(0.2, finish)

    def _handle_remote_command(
        self, agent: SimAgent, effect: commands.FinalizeCheckpoint | commands.TidyRemoteTier
    ) -> None:
        if isinstance(effect, commands.FinalizeCheckpoint):
            if self.publishes:
                self._finalize(agent, effect)
        elif self.tidies:
            self._tidy(agent, effect)

    def _tidy(self, agent: SimAgent, effect: commands.TidyRemoteTier) -> None:
        self.signal(agent, RetentionDone(effect.step), effect.attempt)

    # --- processes ------------------------------------------------------------------------------

    def _boot(self, agent: SimAgent) -> None:
        life = agent.incarnation

        def ready() -> None:
            if agent.alive and agent.incarnation == life and not agent.never_ready:
                agent.become_ready()
                if agent.reachable:
                    self.send(inputs.AgentUp(agent.report()))

        if agent.reachable:
            self.send(inputs.AgentUp(agent.report()))
        self.at(self.random.uniform(0.2, 1.0), ready)

    def _list_remotes(self) -> None:
        if self.ended is None:
            if self.core.phase is Phase.FINISHING:
                self.feed(inputs.RemoteCheckpoints(tuple(self.remotes.values())))
            self.at(5.0, self._list_remotes)

    def _exited(self, agent: SimAgent, worker: SimWorker, exited: WorkerExited) -> None:
        self.signal(
            agent,
            replace(exited, step=worker.step),
            worker.attempt,
            rank=worker.rank,
            worker=worker.name,
            pid=worker.pid,
        )

    def fail_worker(
        self,
        agent: SimAgent,
        worker: SimWorker,
        kind: ErrorKind,
        message: str,
        type_: str = "RuntimeError",
        **extra: Any,
    ) -> None:
        if worker.state in (WorkerState.DONE, WorkerState.LEFT):
            return
        worker.state = WorkerState.PARKED
        error = ErrorReport(kind, type_, message, "Traceback: ...", worker.step)
        worker.failure = WorkerFailed(error, **extra)
        self.signal(agent, worker.failure, worker.attempt, rank=worker.rank, worker=worker.name)

    def emitted(self, kind: EventKind) -> list[dict[str, Any]]:
        """The data of every emitted event of that kind, in order."""
        return [event.data for event in self.events if event.kind == kind]
