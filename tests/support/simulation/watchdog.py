"""The invariants of the recovery core, checked after every input of a simulated job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from holdfast_service.job_model.events.incidents import IncidentClosedEvent
from holdfast_service.job_model.events.progress import EndedEvent
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import effects as fx
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.core_state.stage_timer import Stage
from holdfast_workers.protocol import commands
from holdfast_workers.protocol.messages import Place, Tier
from holdfast_workers.protocol.signals import SignalKind


class Watchdog:
    """Checks all inputs and effects of a job, across restarts of its supervisor."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._attempt = 0
        self._formed: set[int] = set()
        self._dead: set[str] = set()
        self._capacity: dict[tuple[int, str, str], int] = {}
        self._workers: dict[tuple[int, str, str], set[str]] = {}
        self._offered: dict[tuple[int, str], set[tuple[int, Place, int, int]]] = {}
        self._stepping = 0
        self._ended = False

    def supervisor_restarted(self) -> None:
        self._capacity.clear()
        self._workers.clear()
        self._offered.clear()

    def committed(self, attempt: int, step: int) -> None:
        """A step was applied. Once an attempt has applied a step, no older attempt may."""
        assert attempt >= self._stepping, f"attempt {attempt} steps after {self._stepping}"
        assert not self._ended or step <= self._config.spec.train.last_step
        self._stepping = attempt

    def check(
        self, core: RecoveryCore, value: inputs.Input, effects: Sequence[fx.Effect], now: float
    ) -> None:
        self._record_input(value)
        forms: dict[str, commands.Form] = {}
        for effect in effects:
            assert not self._ended, f"{effect} after the end"
            match effect:
                case (
                    commands.Fence()
                    | commands.WarmUp()
                    | commands.SetPartners()
                    | commands.Finish()
                ):
                    assert effect.attempt >= self._attempt, "attempts only grow"
                    self._attempt = effect.attempt
                case commands.Form():
                    assert effect.agent not in forms, "one order per agent"
                    forms[effect.agent] = effect
                case commands.SaveShard():
                    wanted = (effect.rank, effect.place, effect.attempt, effect.step)
                    assert wanted in self._offered[core.attempt, effect.agent], "it holds it"
                case fx.End():
                    self._ended = True
                case _:
                    pass
        if forms:
            self._check_world(list(forms.values()))
        self._check_phases(effects)
        self._check_end(core, effects)
        self._check_deadline(core)
        self._check_wait(core, now)

    def _record_input(self, value: inputs.Input) -> None:
        if isinstance(value, inputs.Fenced):
            report = value.report
            key = (value.attempt, value.agent, report.incarnation)
            self._capacity[key] = report.capacity
            self._workers.setdefault(key, set()).update(worker.worker for worker in report.workers)
            self._offered.setdefault((value.attempt, value.agent), set()).update(
                (h.rank, h.place, h.attempt, h.step) for h in report.held
            )
        elif isinstance(value, inputs.Signals):
            for signal in value.signals:
                if signal.kind is SignalKind.WORKER_EXITED and signal.worker is not None:
                    self._dead.add(signal.worker)

    def _check_world(self, forms: Sequence[commands.Form]) -> None:
        attempts = {form.order.attempt for form in forms}
        assert len(attempts) == 1
        (attempt,) = attempts
        assert attempt not in self._formed, f"two worlds for attempt {attempt}"
        assert attempt >= max(self._formed, default=0), "attempts only grow"
        self._formed.add(attempt)
        seats = [(form.agent, seat) for form in forms for seat in form.order.seats]
        ranks = Counter(seat.rank for _, seat in seats)
        assert ranks == Counter(range(forms[0].order.world_size)), "every rank exactly once"
        workers = Counter(seat.worker for _, seat in seats if seat.worker is not None)
        assert all(count == 1 for count in workers.values()), "one rank per worker"
        assert len({(f.order.store_host, f.order.store_port) for f in forms}) == 1
        assert forms[0].order.store_port > 0, "no attempt is formed without a store"
        for form in forms:
            key = (attempt, form.agent, form.incarnation)
            assert key in self._capacity, f"{form.agent} was not fenced for attempt {attempt}"
            assert len(form.order.seats) <= self._capacity[key], "capacity"
            alive = self._workers[key]
            for seat in form.order.seats:
                if seat.worker is not None:
                    assert seat.worker not in self._dead, f"{seat.worker} is dead"
                    assert seat.worker in alive, f"{seat.worker} is not on {form.agent}"
                partners = [partner.agent for partner in seat.partners]
                assert form.agent not in partners, "never the own agent"
                most = self._config.spec.checkpoint.memory.partner_copies
                assert len(set(partners)) == len(partners) <= most
        self._check_restores(attempt, [(agent, seat.rank, seat.restore) for agent, seat in seats])

    def _check_restores(self, attempt: int, restores: list[tuple[str, int, object]]) -> None:
        steps = {(restore.step, restore.attempt) for _, _, restore in restores}  # type: ignore[attr-defined]
        assert len(steps) == 1, "all ranks take the same step of the same attempt"
        for agent, rank, restore in restores:
            tier = restore.tier  # type: ignore[attr-defined]
            if tier not in (Tier.OWN_RAM, Tier.PARTNER_RAM):
                continue
            holder = restore.agent  # type: ignore[attr-defined]
            assert (holder == agent) == (tier is Tier.OWN_RAM)
            held = self._offered[attempt, holder]
            wanted = (rank, restore.place, restore.attempt, restore.step)  # type: ignore[attr-defined]
            assert wanted in held, f"{holder} does not hold {wanted}"

    def _check_phases(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, fx.Emit) and isinstance(effect.event, IncidentClosedEvent):
                record = effect.event.record
                phases_s = dict(record.phases_s)
                total_s = phases_s.pop("total")
                assert abs(sum(phases_s.values()) - total_s) < 1e-5, f"{phases_s} of {total_s}"
                assert record.closed_at is not None and record.signalled_at is not None
                assert abs(record.closed_at - record.signalled_at - total_s) < 1e-5

    def _check_end(self, core: RecoveryCore, effects: Sequence[fx.Effect]) -> None:
        ends = [index for index, effect in enumerate(effects) if isinstance(effect, fx.End)]
        emitted = [effect.event for effect in effects if isinstance(effect, fx.Emit)]
        ended_events = [event for event in emitted if isinstance(event, EndedEvent)]
        assert len(ends) == len(ended_events) <= 1
        if ends:
            assert ends[0] == len(effects) - 1, "the end is the last effect"
            assert core.stage is Stage.ENDED

    def _check_deadline(self, core: RecoveryCore) -> None:
        free = core.stage is Stage.ENDED
        assert free == (core.next_deadline() is None), f"{core.stage} without a deadline"

    def _check_wait(self, core: RecoveryCore, now: float) -> None:
        """A job waits only as long as no attempt can be formed: a copy of the core that looks
        again, after news of an agent that does not exist, waits too. The answer to a fence makes
        the core look again anyway."""
        if core.stage is Stage.WAITING and not core.state.fencing.awaiting:
            copy = deepcopy(core)
            copy.handle(inputs.LeaseEnded("none"), now)
            assert copy.stage is Stage.WAITING, "an attempt can be formed, and the job waits"
