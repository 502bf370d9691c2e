"""The supervisor: one per job, the hands and ears of the recovery core.

It owns soft state only. Whatever it must remember is held by others: attempt and epoch by the
agents (and by a file in the job's folder), history by the events that the agents keep for it,
state by the memory tier. When it dies, the next one asks, takes a higher epoch and goes on;
training does not stop meanwhile.

One thread takes inputs from a queue, feeds the core, and carries out its effects; calls to agents
run elsewhere and come back as inputs. No decision is taken here.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast_service.agent_watch import Agents, AgentWatch
from holdfast_service.event_log import EventLog
from holdfast_service.fence_file import FenceFile
from holdfast_service.recovery import effects as do
from holdfast_service.recovery import inputs as say
from holdfast_service.recovery.config import RecoveryConfig
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.facts import Facts
from holdfast_service.registry import RemoteCheckpoint
from holdfast_service.reports import Cursors, EventKind, JobLaunch, Phase, SupervisorReport
from holdfast_service.run_record import RunRecord
from holdfast_workers.checkpoint.manifest import list_checkpoints
from holdfast_workers.messages import AgentReport, Signal


@dataclass(frozen=True)
class SupervisorTimes:
    """Intervals and deadlines of the shell, in seconds."""

    first_contact_s: float = 3.0
    hello_s: float = 2.0
    look_s: float = 0.5
    poll_s: float = 1.0
    listing_s: float = 3.0
    call_s: float = 10.0
    form_call_s: float = 100.0
    """Long enough for an agent whose zygote has just died to start another, which imports torch;
    an agent that dies over it is noticed by its lifeline."""
    finalize_s: float = 120.0
    heartbeat_timeout_s: float = 2.0
    enquiry_s: float = 1.0
    last_words_s: float = 3.0


class Supervisor:
    """See the module. `run` returns when the job has ended; `report` goes on answering."""

    def __init__(
        self,
        launch: JobLaunch,
        config: RecoveryConfig,
        agents: Agents,
        secret: bytes,
        remote_root: Path,
        keep_remote: int,
        times: SupervisorTimes | None = None,
    ) -> None:
        self._launch = launch
        self._config = config
        self._agents = agents
        self._remote_root = remote_root
        self._keep_remote = keep_remote
        self._times = times or SupervisorTimes()
        self._inputs: queue.SimpleQueue[say.Input] = queue.SimpleQueue()
        self._events = EventLog(launch.last_event)
        self._record = RunRecord()
        self._fence_file = FenceFile(Path(launch.data_dir))
        self._watch = AgentWatch(
            agents,
            secret,
            self._inputs.put,
            heartbeat_timeout_s=self._times.heartbeat_timeout_s,
            hello_s=self._times.hello_s,
            enquiry_s=self._times.enquiry_s,
        )
        self._core: RecoveryCore | None = None
        self._epoch = 0
        self._polled: dict[str, Future[Any]] = {}
        self._ended = False
        self._gone = False
        self._cancel: str | None = None
        self._next_look = 0.0
        self._next_poll = 0.0
        self._next_listing = 0.0
        self._do = self._effects()

    # --- called from outside, by any thread -------------------------------------------------------

    def signal(self, signal: Signal) -> None:
        """An agent saw something."""
        self._inputs.put(say.Signals((signal,)))

    def cancel(self, reason: str) -> None:
        self._cancel = reason
        self._inputs.put(say.CancelRequested(reason))

    def vanish(self) -> None:
        """Stop at once and tell nobody, as a killed process would."""
        self._gone = True
        self._inputs.put(say.Tick())
        self._watch.close()

    def report(self, cursors: Cursors) -> SupervisorReport:
        """What is new since `cursors`."""
        core = self._core
        rows, digests, logs = self._record.after(cursors)
        return SupervisorReport(
            epoch=self._epoch,
            phase=Phase.ENDED if self._ended else _before_end(core),
            step=core.committed if core else 0,
            attempt=core.attempt if core else 0,
            events=self._events.after(cursors.event),
            rows=rows,
            digests=digests,
            logs=logs,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Supervise until the job has ended. An internal error ends the job with its traceback."""
        try:
            self._begin()
            while not (self._ended or self._gone):
                self._turn()
        except Exception as error:
            self._fail(error)
        self._watch.close()

    def _begin(self) -> None:
        """Find what is there, take a higher epoch, and let the core adopt or start."""
        self._agents.ensure()
        reports = self._first_contact()
        floor = self._fence_file.read()
        remotes = self._remote_checkpoints()
        self._epoch = 1 + max([floor.epoch, *(report.epoch for report in reports)])
        self._events.adopt(self._kept_events(reports))
        facts = Facts.from_events(self._events.all())
        attempt = max(
            facts.attempt,
            floor.attempt,
            self._launch.last_attempt,
            *(report.attempt for report in reports),
            *(one.attempt for one in remotes),
        )
        # Before anybody hears of the epoch: who cannot be reached now may remember it later.
        self._fence_file.write(self._epoch, attempt)
        facts = replace(facts, attempt=attempt)
        self._core = RecoveryCore(self._config, time.time(), facts if attempt else None)
        if facts.ended is not None:
            self._stop_everybody()
            self._ended = True
            return
        self._feed(say.RemoteCheckpoints(remotes))
        if self._cancel is not None:
            self._feed(say.CancelRequested(self._cancel))

    def _turn(self) -> None:
        core = self._core
        assert core is not None
        now = time.time()
        deadline = core.next_deadline()
        until = min(self._next_look, self._next_poll, deadline or now + 1.0)
        try:
            given: say.Input = self._inputs.get(timeout=max(0.0, until - now))
        except queue.Empty:
            given = say.Tick()
        if not isinstance(given, say.Tick) or (deadline is not None and time.time() >= deadline):
            self._feed(given)
        self._look_around()

    def _feed(self, given: say.Input) -> None:
        assert self._core is not None
        for effect in self._core.handle(given, time.time()):
            self._do[type(effect)](effect)

    # --- looking ----------------------------------------------------------------------------------

    def _look_around(self) -> None:
        now = time.time()
        if now >= self._next_look:
            self._next_look = now + self._times.look_s
            self._watch.look(self._epoch)
        if now >= self._next_listing:
            self._next_listing = now + self._times.listing_s
            if self._core is not None and self._core.phase is Phase.FINISHING:
                # the answer of a publisher may have died with an earlier supervisor
                with contextlib.suppress(OSError):  # the next listing may succeed, or time is up
                    self._feed(say.RemoteCheckpoints(self._remote_checkpoints()))
        if now >= self._next_poll:
            self._next_poll = now + self._times.poll_s
            for seat in self._watch.seats:
                self._collect(seat)

    def _first_contact(self) -> list[AgentReport]:
        """Reports of the agents that were there before us; a short wait, for most are new."""
        calls = {
            seat: self._agents.call(seat, "report", timeout_s=self._times.first_contact_s)
            for seat in self._agents.seats
        }
        wait(calls.values(), timeout=self._times.first_contact_s + 1.0)
        return [c.result() for c in calls.values() if c.done() and c.exception() is None]

    def _kept_events(self, reports: list[AgentReport]) -> list[dict[str, Any]]:
        events: dict[int, dict[str, Any]] = {}
        for report in reports:
            call = self._agents.call(
                report.agent, "kept_events", timeout_s=self._times.first_contact_s
            )
            try:
                events.update({event["seq"]: event for event in call.result()})
            except Exception:  # another agent keeps the same events
                traceback.print_exc()
        return [events[seq] for seq in sorted(events)]

    def _remote_checkpoints(self) -> tuple[RemoteCheckpoint, ...]:
        if not self._remote_root.exists():
            return ()
        return tuple(
            RemoteCheckpoint(found.step, found.attempt, str(found.folder))
            for found in list_checkpoints(self._remote_root)
        )

    def _collect(self, seat: str) -> None:
        """Fetch rows, digests and log lines from an agent, and leave our events with it."""
        running = self._polled.get(seat)
        if running is not None and not running.done():
            return
        known = self._watch.known(seat)
        if known is None:
            return
        row, line = self._record.cursor(seat, known.incarnation)
        events = self._events.unkept_by(seat, known.incarnation)
        call = self._agents.call(
            seat, "poll", row, line, events, self._events.acked, timeout_s=self._times.call_s
        )
        self._polled[seat] = call
        call.add_done_callback(lambda done: self._collected(seat, known.incarnation, events, done))

    def _collected(
        self, seat: str, incarnation: str, events: list[dict[str, Any]], call: Future[Any]
    ) -> None:
        if call.cancelled() or call.exception() is not None:
            return  # the lifeline says whether it is gone
        self._events.kept(seat, incarnation, events)
        newest = self._record.add(seat, incarnation, *call.result())
        if newest is not None:
            self._inputs.put(say.StepCommitted(*newest))

    # --- effects ----------------------------------------------------------------------------------

    def _effects(self) -> dict[type, Callable[[Any], None]]:
        return {
            do.Fence: self._fence,
            do.Form: self._form,
            do.WarmUp: self._warm_up,
            do.SetPartner: self._set_partner,
            do.RemoveAgent: self._remove_agent,
            do.FinalizeCheckpoint: self._finalize,
            do.Emit: self._emit,
            do.Stop: self._stop,
            do.End: self._end,
        }

    def _fence(self, effect: do.Fence) -> None:
        self._fence_file.write(self._epoch, effect.attempt)
        self._command(
            effect,
            "fence",
            (effect.attempt, self._events.unkept_by(effect.agent, effect.incarnation)),
            self._config.fence_timeout_s,
            lambda report: say.Fenced(effect.agent, effect.attempt, report),
        )

    def _form(self, effect: do.Form) -> None:
        events = self._events.unkept_by(effect.agent, effect.incarnation)
        self._command(effect, "form", (effect.order, events), self._times.form_call_s)

    def _warm_up(self, effect: do.WarmUp) -> None:
        self._command(effect, "warm_up", (effect.attempt,), self._times.form_call_s)

    def _set_partner(self, effect: do.SetPartner) -> None:
        arguments = (effect.attempt, effect.rank, effect.partner)
        self._command(effect, "set_partner", arguments, self._times.call_s)

    def _remove_agent(self, effect: do.RemoveAgent) -> None:
        self._watch.forget(effect.agent)
        try:
            self._agents.restart(effect.agent)
        except Exception:  # it is gone already, or its node is
            traceback.print_exc()

    def _finalize(self, effect: do.FinalizeCheckpoint) -> None:
        self._command(
            effect,
            "finalize",
            (effect.step, effect.attempt, self._keep_remote),
            self._times.finalize_s,
            lambda answer: say.CheckpointFinalized(
                step=effect.step,
                attempt=effect.attempt,
                uri=answer["uri"],
                nbytes=answer["nbytes"],
                deleted=tuple(answer["deleted"]),
            ),
            name="finalize_checkpoint",
        )

    def _stop(self, effect: do.Stop) -> None:
        # With the last events: should we die before they are stored, the end is still known.
        events = self._events.unkept_by(effect.agent, effect.incarnation)
        self._command(effect, "stop_workers", (events,), self._times.call_s, name="stop")

    def _emit(self, effect: do.Emit) -> None:
        if effect.kind is EventKind.ENDED:
            self._last_words()
        self._events.append(effect.kind, effect.data)

    def _end(self, effect: do.End) -> None:
        del effect  # the ENDED event said it
        self._ended = True

    def _command(
        self,
        effect: Any,
        method: str,
        arguments: tuple[Any, ...],
        timeout_s: float,
        answer: Callable[[Any], say.Input] | None = None,
        name: str | None = None,
    ) -> None:
        """Call an agent; its answer, or its failure, comes back as an input."""
        call = self._agents.call(effect.agent, method, self._epoch, *arguments, timeout_s=timeout_s)

        def done(finished: Future[Any]) -> None:
            if finished.cancelled():
                return
            error = finished.exception()
            if error is not None:
                self._inputs.put(
                    say.CommandFailed(
                        agent=effect.agent,
                        command=name or method,
                        attempt=getattr(effect, "attempt", 0),
                        why=f"{type(error).__name__}: {str(error)[:500]}",
                        incarnation=effect.incarnation,
                        step=getattr(effect, "step", 0),
                    )
                )
            elif answer is not None:
                self._inputs.put(answer(finished.result()))

        call.add_done_callback(done)

    def _last_words(self) -> None:
        """The last rows, digests and lines, before the end is told."""
        for seat in self._watch.seats:
            self._collect(seat)
        pending = list(self._polled.values())
        wait(pending, timeout=self._times.last_words_s)
        for seat in self._watch.seats:
            self._collect(seat)
        wait(list(self._polled.values()), timeout=self._times.last_words_s)

    def _fail(self, error: Exception) -> None:
        """Our own defect: say so, rather than leave the job hanging."""
        text = "".join(traceback.format_exception(error))
        threading.excepthook(
            threading.ExceptHookArgs([type(error), error, error.__traceback__, None])
        )
        self._events.append(
            EventKind.ENDED,
            {
                "outcome": "FAILED",
                "code": "supervisor_error",
                "message": f"the supervisor failed: {type(error).__name__}: {error}",
                "traceback": text,
                "step": self._core.committed if self._core else 0,
            },
        )
        self._stop_everybody()
        self._ended = True

    def _stop_everybody(self) -> None:
        for seat in self._agents.seats:
            events = self._events.unkept_by(seat, "")
            self._agents.call(
                seat, "stop_workers", self._epoch, events, timeout_s=self._times.call_s
            )


def _before_end(core: RecoveryCore | None) -> Phase:
    """ENDED is told only once the last words are in."""
    if core is None:
        return Phase.STARTING
    return Phase.FINISHING if core.phase is Phase.ENDED else core.phase
