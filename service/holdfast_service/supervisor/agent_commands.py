"""Carries out the recovery core's effects on agents as remote calls.

The answer or failure of a call becomes an input of the core. Nothing here blocks: every call has a
deadline and completes on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from holdfast_service.recovery.core_state import effects, inputs
from holdfast_service.supervisor.agent_watch import Agents
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.fence_file import FenceFile
from holdfast_workers.agent.remote_saves import RemoteTierRefused


@dataclass(frozen=True)
class CallTimes:
    """Deadlines of calls to agents, in seconds."""

    call_s: float = 10.0
    form_call_s: float = 100.0
    """Long enough for an agent whose zygote has just died to start another, which imports torch.
    The lifeline detects an agent that dies meanwhile."""
    finalize_s: float = 120.0
    check_s: float = 45.0
    """For the check of a node before it is used."""


class AgentCommands:
    """Sends commands under `epoch`, this supervisor's epoch; agents refuse a lower epoch.

    `epoch` is 0 until the supervisor has chosen its epoch.
    """

    def __init__(
        self,
        agents: Agents,
        events: EventLog,
        fence_file: FenceFile,
        submit_input: Callable[[inputs.Input], None],
        times: CallTimes,
        fence_timeout_s: float,
        inspect_timeout_s: float,
    ) -> None:
        self.epoch = 0
        self._agents = agents
        self._events = events
        self._fence_file = fence_file
        self._submit_input = submit_input
        self._times = times
        self._fence_timeout_s = fence_timeout_s
        self._inspect_timeout_s = inspect_timeout_s

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """The handler of each effect type that an agent carries out."""
        return {
            effects.Fence: self._fence,
            effects.Form: self._form,
            effects.WarmUp: self._warm_up,
            effects.SetPartners: self._set_partners,
            effects.FreeMemory: self._free_memory,
            effects.SetIntervals: self._set_intervals,
            effects.Finish: self._finish,
            effects.Inspect: self._inspect,
            effects.SaveShard: self._save_shard,
            effects.FinalizeCheckpoint: self._finalize,
            effects.TidyRemoteTier: self._tidy,
            effects.CheckNode: self._check_node,
            effects.InjectFault: self._inject,
            effects.Stop: self._stop,
        }

    def stop_all_workers(self) -> None:
        """End every worker on every agent, because the job is over."""
        for seat in self._agents.seats:
            events = self._events.not_backed_up_by(seat, "")
            self._agents.call(
                seat, "stop_workers", self.epoch, events, timeout_s=self._times.call_s
            )

    def _fence(self, effect: effects.Fence) -> None:
        self._fence_file.write(self.epoch, effect.attempt)
        events = self._events.not_backed_up_by(effect.agent, effect.incarnation)
        self._command(
            effect,
            "fence",
            (effect.attempt, events, effect.condemned),
            self._fence_timeout_s,
            lambda report: inputs.Fenced(effect.agent, effect.attempt, report),
        )

    def _form(self, effect: effects.Form) -> None:
        events = self._events.not_backed_up_by(effect.agent, effect.incarnation)
        self._command(effect, "form", (effect.order, events), self._times.form_call_s)

    def _warm_up(self, effect: effects.WarmUp) -> None:
        self._command(effect, "warm_up", (effect.attempt,), self._times.form_call_s)

    def _set_partners(self, effect: effects.SetPartners) -> None:
        arguments = (effect.attempt, effect.rank, effect.partners)
        names = tuple(partner.agent for partner in effect.partners)
        done = inputs.PartnersSet(
            effect.agent, effect.attempt, effect.rank, names, effect.incarnation
        )
        self._command(effect, "set_partners", arguments, self._times.call_s, lambda _: done)

    def _free_memory(self, effect: effects.FreeMemory) -> None:
        arguments = (effect.attempt, effect.mesh, effect.own, effect.replicas)
        self._command(effect, "free_memory", arguments, self._times.call_s)

    def _set_intervals(self, effect: effects.SetIntervals) -> None:
        arguments = (effect.attempt, effect.memory, effect.remote)
        self._command(effect, "set_intervals", arguments, self._times.call_s)

    def _finish(self, effect: effects.Finish) -> None:
        events = self._events.not_backed_up_by(effect.agent, effect.incarnation)
        self._command(effect, "finish", (effect.attempt, events), self._times.call_s)

    def _inspect(self, effect: effects.Inspect) -> None:
        self._command(
            effect,
            "inspect",
            (effect.attempt,),
            self._inspect_timeout_s,
            lambda seen: inputs.Inspected(
                effect.agent, effect.attempt, effect.number, tuple(seen), effect.incarnation
            ),
        )

    def _save_shard(self, effect: effects.SaveShard) -> None:
        arguments = (effect.rank, effect.place, effect.attempt, effect.step)
        self._command(effect, "save_held", arguments, self._times.form_call_s)

    def _finalize(self, effect: effects.FinalizeCheckpoint) -> None:
        self._command(
            effect,
            "finalize",
            (effect.step, effect.attempt),
            self._times.finalize_s,
            lambda answer: inputs.CheckpointFinalized(
                step=effect.step,
                attempt=effect.attempt,
                uri=answer["uri"],
                nbytes=answer["nbytes"],
                metrics=answer["metrics"],
            ),
            name="finalize_checkpoint",
        )

    def _tidy(self, effect: effects.TidyRemoteTier) -> None:
        arguments = (effect.attempt, effect.step, effect.unfinished, effect.bad)
        self._command(effect, "tidy", arguments, self._times.call_s)

    def _check_node(self, effect: effects.CheckNode) -> None:
        self._command(
            effect, "check", (), self._times.check_s, inputs.NodeChecked, name="check_node"
        )

    def _inject(self, effect: effects.InjectFault) -> None:
        arguments = (effect.number, effect.fault.document())
        self._command(effect, "inject", arguments, self._times.call_s)

    def _stop(self, effect: effects.Stop) -> None:
        # The command carries the last events: if the supervisor dies before they are stored, the
        # agents still know the outcome.
        events = self._events.not_backed_up_by(effect.agent, effect.incarnation)
        self._command(effect, "stop_workers", (events,), self._times.call_s, name="stop")

    def _command(
        self,
        effect: Any,
        method: str,
        arguments: tuple[Any, ...],
        timeout_s: float,
        answer: Callable[[Any], inputs.Input] | None = None,
        name: str | None = None,
    ) -> None:
        """Call an agent; submit its answer or its failure as an input."""
        call = self._agents.call(effect.agent, method, self.epoch, *arguments, timeout_s=timeout_s)

        def done(finished: Future[Any]) -> None:
            if finished.cancelled():
                return
            error = finished.exception()
            if error is not None:
                self._submit_input(
                    inputs.CommandFailed(
                        agent=effect.agent,
                        command=name or method,
                        attempt=getattr(effect, "attempt", 0),
                        why=f"{type(error).__name__}: {str(error)[:500]}",
                        incarnation=effect.incarnation,
                        step=getattr(effect, "step", 0),
                        refused=isinstance(error, RemoteTierRefused),
                        number=getattr(effect, "number", 0),
                    )
                )
            elif answer is not None:
                self._submit_input(answer(finished.result()))

        call.add_done_callback(done)
