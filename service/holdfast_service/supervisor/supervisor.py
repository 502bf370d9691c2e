"""The supervisor of one job: runs the recovery core and connects it to agents and storage.

It owns soft state only. Agents hold the attempt and the epoch, as does the fence in the remote
storage, and back up the events; the memory tier holds the training state. When a supervisor dies,
its successor reads them, takes a higher epoch and goes on; training does not stop meanwhile.

One thread takes inputs from a queue, feeds the core, and carries out its effects; calls to agents
run on other threads and return as inputs. No recovery decision is made here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace

import structlog

from holdfast_service.job_model.events.attempts import AttemptFormingEvent
from holdfast_service.job_model.events.codec import read_event
from holdfast_service.job_model.events.progress import AwayWhy, EndedEvent, JobAwayEvent
from holdfast_service.job_model.supervisor_protocol import (
    Cursors,
    Phase,
    SizeOrder,
    StartWait,
    StopOrder,
    SupervisorReport,
)
from holdfast_service.job_model.world_history import LEAST_ABSENCE_S
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import effects, inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.recovery_config import RecoveryConfig
from holdfast_service.recovery.world.start_wait import start_wait
from holdfast_service.supervisor.agent_commands import AgentCommands
from holdfast_service.supervisor.agent_watch import Agents, AgentWatch
from holdfast_service.supervisor.drain_watch import DrainWatch
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.fence_record import FenceRecord, InjectionRecord
from holdfast_service.supervisor.link_check import LinkChecker
from holdfast_service.supervisor.news import News
from holdfast_service.supervisor.rank_progress import ProgramRankTimes, ProgressRecord
from holdfast_service.supervisor.remote_inventory import RemoteInventory
from holdfast_service.supervisor.run_buffer import RunBuffer
from holdfast_service.supervisor.successor_watch import SuccessorWatch
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.agent.run_journal import PAGE_ROWS
from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.errors import StaleCommand
from holdfast_workers.fault_injection.kinds import Injection, Victim
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.protocol.answers import AgentReport, KeptEvents, PollAnswer
from holdfast_workers.protocol.commands import Describe, ListEvents, Request
from holdfast_workers.protocol.lease import STEPPING_SHARE, Grant, clock_s
from holdfast_workers.protocol.messages import Beat, SupervisorEvent, WorkerState
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.signals import Signal, WorkerFailed

_log = structlog.get_logger()

FINAL_POLL_S = 0.05
"""Between two polls of agents whose last lines wait for room."""
AT_WORK = (WorkerState.JOINING, WorkerState.TRAINING)
UNSEEN_NUMBERS = 1_000
"""A supervisor that could not read the fence leaves out this many epochs and attempts: more than
former supervisors can have used while the storage was away."""


class Supervisor:
    """Supervises one job: `run` returns when the job has ended; `report` still answers then."""

    def __init__(
        self,
        config: RecoveryConfig,
        agents: Agents,
        secret: bytes,
        remote: Storage,
        fence: Storage,
        is_latest: Callable[[], bool | None],
        times: SupervisorTimes | None = None,
        kill_self: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
        process: ProcessIdentity | None = None,
        tls: PeerTls | None = None,
    ) -> None:
        """`fence`: of `open_fence`. `is_latest()`: whether the cluster has started no other
        supervisor of this job since; None: unknown. `kill_self()` ends the process; the cluster
        starts it again, if it is the latest. Ranks step on for a while after the end of `process`,
        the supervisor's own; None: not known."""
        self._config = config
        self._plan = plan = config.plan
        self._agents = agents
        self._times = times or SupervisorTimes()
        self._kill_self = kill_self
        self._inputs: queue.SimpleQueue[inputs.Input] = queue.SimpleQueue()
        self._inventory = RemoteInventory(
            remote,
            lambda found: self._inputs.put(
                inputs.RemoteCheckpoints(found.checkpoints, found.damaged)
            ),
            lambda why: self._inputs.put(inputs.RemoteCheckpoints((), known=False, problem=why)),
        )
        self._news = News()
        self._events = EventLog(plan.last_event, self._news.tell)
        self._run_buffer = RunBuffer()
        self._progress = ProgressRecord()
        self._rank_times, self._comparing = ProgramRankTimes(), threading.Lock()
        self._fence = FenceRecord(fence)
        self._successors = SuccessorWatch(self._fence, is_latest, config.lease_margin_s)
        self._injections = InjectionRecord(fence)
        self._watch = AgentWatch(
            agents,
            secret,
            self._inputs.put,
            self._times,
            lapse_s=config.lapse_s,
            process=process,
            tls=tls,
        )
        self._link_checker = LinkChecker(agents, self._inputs.put, self._times.exchange_s)
        self._drains = DrainWatch(agents, self._inputs.put)
        self._core: RecoveryCore | None = None
        self._order_lock = threading.Lock()
        self._avoided = plan.avoid
        """The newest orders taken. A late one may have replaced a newer one; then the control plane
        repeats that."""
        self._size = SizeOrder(plan.nodes, bool(plan.reserved), plan.reserved or None)
        self._polled: dict[str, Future[None]] = {}
        """Seat → its newest poll; done once the answer has been taken in."""
        self._seats_at_work: set[str] = set()
        """Those whose agents said last that a rank runs there."""
        self._start_wait: StartWait | None = None
        self._ended = False
        self._halted = False
        self._stopping: StopOrder | None = None
        self._stored_incident = plan.last_incident
        """The number of the newest stored incident: the plan of a process that the cluster has
        started again is that of the job's first start."""
        self._looked_at = 0.0
        """When the loop last ran; 0: never."""
        self._next_refresh = 0.0
        self._next_look_at_starting = 0.0
        self._next_poll = 0.0
        self._next_inventory = 0.0
        self._next_drains = 0.0
        self._more_to_collect = False
        """Whether an agent has more than fitted into its answer."""
        self._commands = AgentCommands(
            agents,
            self._events,
            self._fence,
            self._inputs.put,
            self._times,
            config.fence_timeout_s,
            config.inspect_timeout_s,
        )

    # --- called from outside, by any thread -------------------------------------------------------

    def signal(self, signal_: Signal) -> None:
        """Accept a signal of an agent. How far the others have come is asked when a rank fails."""
        if isinstance(signal_.detail, WorkerFailed):
            self._more_to_collect = True
        self._inputs.put(inputs.Signals((signal_,)))

    def stop(self, order: StopOrder) -> None:
        self._stopping = order
        self._inputs.put(inputs.StopRequested(order.kind, order.reason, order.deadline))

    def inject(self, number: int, fault: Injection) -> None:
        """Inject a fault, unless this supervisor or an earlier one has accepted its number."""
        if self._injections.take(number):
            if fault.victim is Victim.SUPERVISOR:
                self._kill_self()
            else:
                self._inputs.put(inputs.FaultRequested(number, fault))

    def avoid(self, nodes: dict[str, Avoided]) -> None:
        """Replace the set of nodes that must not host ranks."""
        with self._order_lock:
            self._inputs.put(inputs.NodesAvoided(nodes))
            self._avoided = nodes

    def resize(self, order: SizeOrder) -> None:
        """Take the size that an elastic job is to have."""
        with self._order_lock:
            self._inputs.put(inputs.SizeOrdered(order.nodes, order.holds_all))
            self._size = order

    def halt(self) -> None:
        """Stop at once without a report, as a killed process would."""
        self._halted = True
        self._inputs.put(inputs.Tick())
        self._watch.close()

    def report(self, cursors: Cursors) -> SupervisorReport:
        """Everything since `cursors`."""
        core = self._core
        self._stored_incident = max(self._stored_incident, cursors.incident)
        if cursors.fresh and not self._ended:
            self._collect_from(self._watch.reports, self._times.fresh_collect_s)
        events = None
        while events != (events := self._events.after(cursors.event)):
            # The digests must be as the events leave them.
            rows, digests, logs = self._run_buffer.after(cursors)
        return SupervisorReport(
            epoch=self._commands.epoch,
            phase=Phase.ENDED if self._ended else _phase_before_end(core),
            step=core.known_step if core else None,
            attempt=core.attempt if core else 0,
            events=events,
            rows=rows,
            digests=digests,
            logs=logs,
            beats=self._progress.for_attempt(core.attempt) if core and not self._ended else (),
            start=None if self._ended else self._start_wait,
            build=core.build if core else "",
            avoided=self._avoided,
            size=self._size,
        )

    def await_news(self, cursors: Cursors, timeout_s: float) -> bool:
        """See `Cluster.await_news`."""
        return self._news.wait(
            lambda: (
                self._events.has_after(cursors.event)
                or self._run_buffer.has_attempt_after(cursors.row[0])
            ),
            timeout_s,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Supervise until the job has ended; an internal error ends the job with its traceback."""
        try:
            self._start()
            while not (self._ended or self._halted):
                self._run_once()
        except Exception as error:
            self._end_after_internal_error(error)
        self._watch.close()
        self._successors.close()
        self._drains.close()
        self._inventory.close()

    def _start(self) -> None:
        """Take a higher epoch than any agent knows; the core adopts the job or starts it."""
        started_at = clock_s()
        self._fence.start_reading()
        has_place = self._agents.ensure()
        reports = self._existing_agents()
        # Ranks step only for a while without a supervisor, so a job with agents is adopted soon.
        times = self._times
        remotes = self._inventory.first(
            times.adoption_inventory_s if reports else times.first_inventory_s
        )
        # If the fence stays unknown, the agents' answers or the end of every lease take its place:
        # docs/architecture/recovery.md has the argument.
        agreed = self._obey_one_supervisor(reports)
        leases_end_at = started_at + (self._config.lapse_s or 0.0)
        floor = self._fence.read(0.0 if agreed else max(0.0, leases_end_at - clock_s()))
        # Claimed before any agent receives the epoch: an agent that cannot be reached now may
        # report it later.
        used = max([floor.epoch if floor else 0, *(report.epoch for report in reports)])
        self._commands.epoch = self._fence.claim(
            used + (1 if floor or agreed else UNSEEN_NUMBERS),
            times.fence_store_s if floor else 0.0,
        )
        floor = self._fence.floor  # as listed after the claim
        history = self._backed_up_events(reports)
        for event in history:
            self._run_buffer.apply(read_event(event))
        facts = Facts.from_events(history)
        if facts.ended is not None:  # by a supervisor whose last report was not stored
            self._collect_final_output(reports)
        self._events.adopt(history, self._commands.epoch)
        attempt = max(
            facts.attempt,
            floor.attempt if floor else 0,
            self._plan.last_attempt,
            *(report.attempt for report in reports),
            *(checkpoint.attempt for checkpoint in remotes.checkpoints),
        )
        if floor is None and not agreed:
            attempt += UNSEEN_NUMBERS
        self._fence.announce(attempt)
        facts = replace(facts, attempt=attempt)
        self._core = RecoveryCore(self._config, time.time(), facts if attempt else None)
        if facts.ended is not None:
            self._commands.stop_all_workers()
            self._ended = True
            return
        self._feed(inputs.NodesAvoided(self._plan.avoid))
        self._feed(inputs.SizeOrdered(self._plan.nodes))
        problem = self._inventory.problem
        listed = inputs.RemoteCheckpoints(
            remotes.checkpoints, remotes.damaged, known=not problem, problem=problem
        )
        self._feed(listed)
        if not has_place:
            self._feed(inputs.NoPlace())
        order = self._stopping
        if order is not None:
            self._feed(inputs.StopRequested(order.kind, order.reason, order.deadline))

    def _run_once(self) -> None:
        core = self._core
        assert core is not None
        now = time.time()
        deadline = core.next_deadline()
        until = min(self._next_refresh, self._next_poll, deadline or now + 1.0)
        if self._watch.some_start:
            until = min(until, self._next_look_at_starting)
        try:
            input_: inputs.Input = self._inputs.get(timeout=max(0.0, until - now))
        except queue.Empty:
            input_ = inputs.Tick()
        if not isinstance(input_, inputs.Tick) or (
            deadline is not None and time.time() >= deadline
        ):
            self._feed(input_)
        if not self._ended:  # the wait for the last output was no absence
            self._run_periodic_checks()

    def _feed(self, input_: inputs.Input) -> None:
        assert self._core is not None
        attempt = self._core.attempt
        if isinstance(input_, inputs.Fenced):
            self._watch.update(input_.report)
        self._core.leave_out_incidents(self._stored_incident)
        requested = self._core.handle(input_, time.time())
        self._start_wait = start_wait(self._core.state)
        if self._core.attempt != attempt:
            self._grant_leases()
        for effect in requested:
            self._execute(effect)

    def _grant_leases(self) -> None:
        """Grant leases to the ranks of the newest attempt.

        A lease ends before the agent would count as silent, or, if this supervisor's end is
        detected, as late as a successor would wait. Nothing is granted unless it was confirmed
        lately that there is no successor.
        """
        core, lease_s = self._core, self._config.spec.recovery.lease_s
        for_s = self._successors.granting_s
        if core is not None and lease_s and for_s:
            silence_s = self._times.heartbeat_timeout_s * STEPPING_SHARE
            grant = Grant(self._commands.epoch, core.attempt, silence_s, lease_s)
            self._watch.grant(grant, for_s)

    # --- periodic checks --------------------------------------------------------------------------

    def _run_periodic_checks(self) -> None:
        now = time.time()
        self._report_absence(now)
        if now >= self._next_refresh:
            self._next_refresh = now + self._times.refresh_s
            self._next_look_at_starting = now + self._times.starting_s  # this looks at all
            if self._successors.found:
                self._end_as_superseded()
                return
            self._successors.refresh()
            self._grant_leases()
            self._watch.refresh(self._commands.epoch)
            self._link_checker.refresh(self._watch.reports, self._commands.epoch)
        if now >= self._next_look_at_starting:
            self._next_look_at_starting = now + self._times.starting_s
            self._watch.ask_starting(self._commands.epoch)
        if now >= self._next_drains:
            self._next_drains = now + self._times.drains_s
            self._drains.refresh()
        if now >= self._next_inventory:
            self._next_inventory = now + self._times.inventory_s
            finishing = self._core is not None and self._core.phase is Phase.FINISHING
            if finishing or not self._inventory.answered:
                # the answer to a finalize call may have been lost with an earlier supervisor
                self._inventory.refresh()
        if now >= self._next_poll or self._more_to_collect:
            trains = self._core is not None and self._core.phase is Phase.RUNNING
            self._next_poll = now + self._times.poll_s * (2 if trains else 1)
            self._more_to_collect = False
            for agent in self._watch.reports:
                self._collect(agent)

    def _report_absence(self, now: float) -> None:
        """Report that this process stood still: no pass of the loop takes as long."""
        since, self._looked_at = self._looked_at, now
        if since and now - since >= LEAST_ABSENCE_S:
            self._events.append(JobAwayEvent(away_s=now - since, why=AwayWhy.STOPPED))

    def _end_as_superseded(self) -> None:
        """End this process, because a later supervisor has been found. If that one is gone and the
        cluster starts this one again, its next life takes a higher epoch."""
        _log.warning("a later supervisor was found: this one ends", epoch=self._commands.epoch)
        self._halted = True
        self._kill_self()

    def _obey_one_supervisor(self, reports: list[AgentReport]) -> bool:
        """Whether the agents of all seats have answered and know the same epoch and attempt: then
        no agent can know a later one."""
        known = {(report.epoch, report.attempt) for report in reports}
        # An agent that was not fenced since it started knows attempt 0.
        fenced = all(report.attempt for report in reports)
        return len(reports) == len(self._agents.seats) and len(known) == 1 and fenced

    def _existing_agents(self) -> list[AgentReport]:
        """Reports of agents that are already running; a short wait, because most are new."""
        calls = {
            seat: self._agents.call(
                seat, Request(Describe()), AgentReport, timeout_s=self._times.first_contact_s
            )
            for seat in self._agents.seats
        }
        wait(calls.values(), timeout=self._times.first_contact_s + 1.0)
        return [c.result() for c in calls.values() if c.done() and c.exception() is None]

    def _backed_up_events(self, reports: list[AgentReport]) -> list[SupervisorEvent]:
        """The events that agents have kept, in order."""
        events: dict[int, SupervisorEvent] = {}
        for report in reports:
            call = self._agents.call(
                report.agent,
                Request(ListEvents()),
                KeptEvents,
                timeout_s=self._times.first_contact_s,
            )
            try:
                events.update({event.seq: event for event in call.result().events})
            except Exception:  # another agent has the same events
                _log.exception("cannot fetch an agent's copy of the events", agent=report.agent)
        return [events[seq] for seq in sorted(events)]

    def _collect(self, agent: AgentReport) -> bool:
        """Fetch rows, digests and log lines from an agent, and back up events on it. False if an
        earlier call is under way, whose answer may be older."""
        seat, incarnation = agent.agent, agent.incarnation
        running = self._polled.get(seat)
        if running is not None and not running.done():
            return False
        events = self._events.not_backed_up_by(seat, incarnation)
        wanted = self._run_buffer.request(seat, incarnation, self._events.acked)
        poll = Request(wanted, self._commands.epoch, events)
        call = self._agents.call(seat, poll, PollAnswer, timeout_s=self._times.call_s)
        self._polled[seat] = collected = Future[None]()

        def collect(done: Future[PollAnswer]) -> None:
            more = False
            try:
                more = self._collected(seat, incarnation, events, done)
            finally:
                if more:
                    self._more_to_collect = True
                collected.set_result(None)
            if more:
                self._inputs.put(inputs.Tick())

        call.add_done_callback(collect)
        return True

    def _collected(
        self,
        seat: str,
        incarnation: str,
        events: tuple[SupervisorEvent, ...],
        call: Future[PollAnswer],
    ) -> bool:
        """Take in an answer; returns whether the agent has more, and there is room for it."""
        if call.cancelled():
            return False
        if (error := call.exception()) is not None:
            if isinstance(error, StaleCommand):
                self._successors.record_refusal()
            return False  # the lifeline reports whether the agent is gone
        self._events.mark_backed_up(seat, incarnation, events)
        answer = call.result()
        at_work = any(worker.state in AT_WORK for worker in answer.workers)
        (self._seats_at_work.add if at_work else self._seats_at_work.discard)(seat)
        self._progress.add(seat, answer.beats)
        self._compare_ranks(answer.beats)
        self._inputs.put(
            inputs.WorkersPolled(
                seat,
                incarnation,
                answer.workers,
                answer.shards,
                answer.failed_shards,
                answer.health,
            )
        )
        newest = self._run_buffer.add(
            seat,
            incarnation,
            answer.rows,
            answer.digests,
            answer.lines,
            answer.digest_attempts,
            answer.lines_left,
        )
        if answer.rows:
            self._news.tell()
            self._inputs.put(inputs.StepsMeasured(answer.rows))
        if newest is not None:
            self._inputs.put(
                inputs.StepCommitted(newest.attempt, newest.step, newest.protected_step)
            )
        return len(answer.rows) >= PAGE_ROWS or bool(answer.lines and answer.lines_left)

    def _compare_ranks(self, beats: tuple[Beat, ...]) -> None:
        """Compare the computing times of a program's ranks, which do not tell each other theirs."""
        core = self._core
        ranks = core.world_size if core is not None and self._config.runs_program else 0
        with self._comparing:
            row = self._rank_times.add(beats, ranks, time.monotonic())
        if row is not None:
            self._inputs.put(inputs.RanksTimed(row))

    # --- effects ----------------------------------------------------------------------------------

    def _execute(self, effect: effects.Effect) -> None:
        match effect:
            case effects.RemoveAgent():
                self._remove_agent(effect)
            case effects.KeepSeats():
                self._agents.keep_seats(effect.seats)
            case effects.Emit():
                self._emit(effect)
            case effects.End():
                self._ended = True  # the ENDED event has the outcome
            case _:
                self._commands.send(effect)

    def _remove_agent(self, effect: effects.RemoveAgent) -> None:
        self._run_buffer.mark_lost(effect.agent, effect.incarnation)
        process = self._watch.forget(effect.agent, effect.incarnation)
        if process is not None:
            self._agents.restart(effect.agent, process)

    def _emit(self, effect: effects.Emit) -> None:
        if isinstance(effect.event, EndedEvent):
            self._collect_final_output(self._watch.reports)
        self._run_buffer.apply(effect.event)  # before the event is reported
        if isinstance(effect.event, AttemptFormingEvent):
            # Rows are reported in order: those of the former attempt, before the next one's arrive.
            self._more_to_collect = True
            self._inputs.put(inputs.Tick())
        self._events.append(effect.event)

    def _collect_final_output(self, agents: list[AgentReport]) -> None:
        """Collect the last rows, digests and lines before the end is reported; lines for as long as
        the service stores them meanwhile, unless ranks still run: they are stopped only then, and
        may print without end. What is left then is marked in the log."""
        wait(self._polled.values(), timeout=self._times.final_collect_s)
        began = moved = time.monotonic()
        self._more_to_collect, left = True, 0
        while self._more_to_collect or left:
            self._start_collecting(agents)
            wait(self._polled.values(), timeout=self._times.final_collect_s)
            now, before, left = time.monotonic(), left, self._run_buffer.lines_left
            moved = moved if left == before else now
            runs = any(agent.agent in self._seats_at_work for agent in agents)
            limit_s = self._times.final_collect_s if runs else self._times.final_s
            if now - moved > self._times.final_collect_s or now - began > limit_s:
                break
            if not self._more_to_collect:
                time.sleep(FINAL_POLL_S)
        self._run_buffer.mark_unfetched()

    def _collect_from(self, agents: list[AgentReport], within_s: float) -> None:
        """Collect all rows, digests and lines that the agents have now."""
        until = time.monotonic() + within_s
        self._more_to_collect = True
        while self._more_to_collect and (left_s := until - time.monotonic()) > 0:
            self._start_collecting(agents)
            wait(self._polled.values(), timeout=left_s)

    def _start_collecting(self, agents: list[AgentReport]) -> None:
        self._more_to_collect = False
        for agent in agents:
            if not self._collect(agent):
                self._more_to_collect = True

    def _end_after_internal_error(self, error: Exception) -> None:
        """End the job with this supervisor's own error, so that the job does not hang."""
        text = "".join(traceback.format_exception(error))
        threading.excepthook(
            threading.ExceptHookArgs([type(error), error, error.__traceback__, None])
        )
        with contextlib.suppress(Exception):  # the error may be of this very part
            self._collect_final_output(self._watch.reports)
        self._events.append(
            EndedEvent(
                outcome="FAILED",
                code="supervisor_error",
                message=f"the supervisor failed: {type(error).__name__}: {error}",
                traceback=text,
                step=self._core.known_step if self._core else None,
            )
        )
        self._commands.stop_all_workers()
        self._ended = True


def _phase_before_end(core: RecoveryCore | None) -> Phase:
    """Report ENDED only after the final output was collected."""
    if core is None:
        return Phase.STARTING
    return Phase.FINISHING if core.phase is Phase.ENDED else core.phase
