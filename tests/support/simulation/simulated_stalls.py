"""Ranks of the simulated cluster that hang or are slow, and the inspections of their agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from tests.support.service.fake_cluster import row
from tests.support.simulation.simulated_agent import SimAgent, SimWorker
from tests.support.simulation.simulated_training import STEP_S, SimulatedTraining

from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_workers.data.token_corpus import MANIFEST_PATIENCE_S
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import (
    Beat,
    ErrorKind,
    FormOrder,
    GroupBeat,
    Inspection,
    Seat,
    WorkerState,
)
from holdfast_workers.protocol.signals import RankStalled

LIMIT_S = 1.0
"""The learned limit of every phase."""
LOOK_S = 5.0
"""Between two looks of a rank for the manifest of its data."""
TOKENS = 1000
"""Tokens of a step in the rows of `SimulatedStalls.speeds`."""


class SimulatedStalls(SimulatedTraining):
    slow_until = 0.0
    """All ranks are in a long phase until this time."""
    slow_limit_s = LIMIT_S
    """The limit of that phase."""
    uninspectable: frozenset[str] = frozenset()
    """Agents that do not answer inspections."""
    slow_nodes: Mapping[str, float] = MappingProxyType({})
    """Node → factor by which its ranks compute more slowly."""
    speeds: Mapping[int, float] = MappingProxyType({})
    """World size → the tokens per second that the step rows of such a world show."""
    stalls_unreported = False
    """Whether agents do not report stalled ranks."""
    change_inspection: Callable[[SimWorker, Inspection], Inspection] | None = None
    """Changes what the inspection of a worker shows."""
    without_data: frozenset[str] = frozenset()
    """Agents whose nodes have no manifest of the job's data, and whose ranks wait for it."""
    data_patience_s = MANIFEST_PATIENCE_S
    """How long they wait."""

    def hang_rank(self, rank: int, process: str = "S") -> None:
        """The rank's worker stops working; its peers wait for it in the step agreement."""
        attempt = max(self.worlds, default=0)
        for at, agent, worker in self.members_of(attempt) if attempt else ():
            if at == rank and worker is not None and self._is_in(agent, worker, attempt):
                worker.hangs = process

                def still_hangs(worker: SimWorker = worker) -> bool:
                    return bool(worker.hangs)

                self._report_stalled(attempt, worker.step + 1, still_hangs)

    def slow_down(self, for_s: float, limit_s: float = LIMIT_S) -> None:
        """All ranks evaluate, or wait for the loader, for `for_s` seconds."""
        attempt = max(self.worlds, default=0)
        self.slow_until, self.slow_limit_s = self.now + for_s, limit_s
        if attempt and attempt in self.restored:
            steps = (worker.step for _, _, worker in self.members_of(attempt) if worker)
            step = max(steps, default=0)
            self._report_stalled(attempt, step + 1, lambda: self.now < self.slow_until)

    def stop_inspections_for(self, agent: str, for_s: float) -> None:
        """The agent does not answer inspections for a while."""
        self.uninspectable |= {agent}
        self.at(for_s, lambda: setattr(self, "uninspectable", self.uninspectable - {agent}))

    def lose_data(self, *agents: str, for_s: float) -> None:
        """The storage of the data does not answer for a while, and these agents need it."""
        self.without_data |= {*agents}
        self.at(for_s, lambda: setattr(self, "without_data", frozenset()))

    def _arrive(self, agent: SimAgent, worker: SimWorker, seat: Seat, order: FormOrder) -> None:
        """A rank without the manifest looks for it until its patience ends."""
        until = self.now + self.data_patience_s
        arrive = super()._arrive

        def look() -> None:
            if agent.name not in self.without_data:
                arrive(agent, worker, seat, order)
            elif self.now < until:
                self.at(min(LOOK_S, until - self.now), look)
            elif self._is_in(agent, worker, order.attempt):
                why = f"MANIFEST did not come into the cache of {agent.name} in time"
                self.fail_worker(agent, worker, ErrorKind.DATA, why, "DataUnavailable")

        look()

    def _report_stalled(self, attempt: int, step: int, still: Callable[[], bool]) -> None:
        """When a rank exceeds its limit, its agent reports it."""

        def say() -> None:
            for rank, agent, worker in self.members_of(attempt):
                there = worker is not None and self._is_in(agent, worker, attempt)
                if (
                    worker is None
                    or not there
                    or not still()
                    or self.stalls_unreported
                    or worker.step >= step
                ):
                    continue
                stalled = RankStalled(self._see(attempt, worker).beat)
                self.signal(agent, stalled, attempt, rank=rank, worker=worker.name)

        self.at(LIMIT_S + self.random.uniform(0, 0.1), say)

    def _step(self, attempt: int, step: int) -> None:
        if self._all_in(attempt, WorkerState.TRAINING):
            if any(
                worker is not None and worker.hangs for _, _, worker in self.members_of(attempt)
            ):
                return
            if self.now < self.slow_until:
                self.at(STEP_S, lambda: self._step(attempt, step))
                return
        before = len(self.committed)
        super()._step(attempt, step)
        if self.slow_nodes and len(self.committed) > before:
            self._send_times(attempt, step)
        if self.speeds and len(self.committed) > before:
            step_s = TOKENS / self.speeds[self.orders[attempt].world_size]
            shown = replace(row(attempt, step), at=self.now, tokens=TOKENS, step_time_s=step_s)
            self.send(inputs.StepsMeasured((shown,)))

    def _send_times(self, attempt: int, step: int) -> None:
        """Send a step row with the compute time of each rank."""
        hosts = [agent.report().node_id for _, agent, _ in self.members_of(attempt)]
        times = (STEP_S * self.slow_nodes.get(node, 1.0) for node in hosts)
        measured = replace(row(attempt, step), step_time_s=1.0, compute_s=tuple(times))
        self.send(inputs.StepsMeasured((measured,)))

    def _carry_out(self, effect: fx.Effect) -> None:
        if isinstance(effect, commands.Inspect):
            self._command(effect, lambda agent: self._inspect(agent, effect))
        else:
            super()._carry_out(effect)

    def _inspect(self, agent: SimAgent, effect: commands.Inspect) -> None:
        if agent.name in self.uninspectable:
            return
        mine = [worker for worker in agent.workers.values() if worker.attempt == effect.attempt]
        seen = tuple(self._see(effect.attempt, worker) for worker in mine)
        if self.change_inspection is not None:
            seen = tuple(map(self.change_inspection, mine, seen))
        self.send(
            inputs.Inspected(agent.name, effect.attempt, effect.number, seen, agent.incarnation),
            0.2,
        )

    def _see(self, attempt: int, worker: SimWorker) -> Inspection:
        """The inspection of a worker: all workers but the hung worker wait in the agreement."""
        hung = [w for _, _, w in self.members_of(attempt) if w is not None and w.hangs]
        absent = bool(worker.hangs) or not hung
        slow = self.now < self.slow_until
        step = worker.step + 1
        assert worker.rank is not None
        beat = Beat(
            rank=worker.rank,
            worker=worker.name,
            pid=worker.pid,
            attempt=attempt,
            step=step,
            phase="evaluate" if slow else "forward" if absent else "reduce",
            micro_batch=0,
            age_s=2 * LIMIT_S if hung or slow else 0.01,
            limit_s=self.slow_limit_s if slow else LIMIT_S,
            groups=(GroupBeat("world", step - absent, step - 1, "all_gather"),),
        )
        return Inspection(beat, worker.hangs or "S", ("somewhere (train.py:1)",))
