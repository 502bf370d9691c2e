"""Tracks which agents of a job are alive, and reports changes as inputs of the core.

An agent is known from its answer to `hello` until it is lost or the supervisor forgets it. A
lifeline belongs to one incarnation of an agent, and so do the reports of its loss.

A broken lifeline is only a suspicion. The loss is certain when the kernel of the agent's process,
or the cluster, reports the end of that process. Otherwise the agent is lost after a silence of
`heartbeat_timeout_s`, and that loss is not certain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from holdfast_service.recovery.core_state import inputs
from holdfast_service.supervisor.supervisor_times import SupervisorTimes
from holdfast_workers.ipc import linux_processes
from holdfast_workers.memory.lifeline import Lifelines
from holdfast_workers.memory.peer_tls import PeerTls
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import CheckNode, Hello, Request
from holdfast_workers.protocol.findings import SOFTWARE
from holdfast_workers.protocol.lease import Grant, clock_s
from holdfast_workers.protocol.process_identity import ProcessIdentity

_log = structlog.get_logger()

Expected = TypeVar("Expected")

PROBE_THREADS = 4
PROBE_PAUSE_S = 0.05
INQUIRY_THREADS = 16
FIRST_INQUIRY_PAUSE_S, MAX_INQUIRY_PAUSE_S = 0.005, 0.1


class Agents(Protocol):
    """The job's node agents, wherever they run."""

    @property
    def seats(self) -> list[str]: ...
    def ensure(self) -> bool:
        """Find the agents, or place them. False: the nodes with room are reserved for others."""
        ...

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        """Send a request to an agent; the future raises RequestRefused, or errors of the way."""
        ...

    def restart(self, seat: str, process: ProcessIdentity) -> None:
        """Kill this process of the agent, and no later one; the agent starts again."""
        ...

    def keep_seats(self, seats: frozenset[str] | None) -> None:
        """Give back the other seats, and ask for none; None: ask for all. Returns at once."""
        ...

    def has_ended(self, seat: str, process: ProcessIdentity) -> bool:
        """Whether the cluster knows that this process of the agent has ended. May block."""
        ...

    def node_answers(self, node_id: str) -> bool: ...
    def draining(self) -> dict[str, float | None]:
        """Ids of nodes that will be removed, with the time (Unix seconds; None: unknown)."""
        ...


@dataclass
class _SilentAgent:
    """An agent that was lost: its last known incarnation, and whether that was checked since."""

    incarnation: str
    checked: bool = False

    def must_be_checked(self, incarnation: str) -> bool:
        """Whether the lost incarnation itself has come back and is still unchecked."""
        return self.incarnation == incarnation and not self.checked


class AgentWatch:
    """Calls `submit_input` from several threads. `lapse_s`: how long a lease of a former supervisor
    may outlive that supervisor (None: leases are off). A lease that this supervisor grants ends
    before its agent counts as silent."""

    def __init__(
        self,
        agents: Agents,
        secret: bytes,
        submit_input: Callable[[inputs.Input], None],
        times: SupervisorTimes,
        *,
        lapse_s: float | None = None,
        process: ProcessIdentity | None = None,
        tls: PeerTls | None = None,
    ) -> None:
        """`process`: this supervisor's own, which it introduces to the agents."""
        self._agents = agents
        self._submit_input = submit_input
        self._times = times
        self._lapse_s = lapse_s
        self._epoch = 0
        self._silent: dict[str, _SilentAgent] = {}
        self._lease_ends: dict[tuple[str, str], float] = {}
        """(seat, incarnation) -> end of the lease of a lost incarnation; until it is reported."""
        self._seats_seen: set[str] = set()
        """Seats whose possible lease of a former supervisor is in `_lease_ends` already."""
        self._known: dict[str, AgentReport] = {}
        self._starting_until: dict[str, float] = {}
        self._pending: dict[str, Future[AgentReport]] = {}
        self._hello = Hello(process)
        self._processes: dict[str, ProcessIdentity] = {}
        """Lifeline → process of that incarnation, for every incarnation met."""
        self._inquiries: set[str] = set()
        """Lifelines whose process is asked about now."""
        self._inquiry_pool = ThreadPoolExecutor(INQUIRY_THREADS, thread_name_prefix="inquiry")
        self._probe_pool = ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="node-probe")
        self._lifelines = Lifelines(
            secret, self._on_silence, times.heartbeat_timeout_s, self._on_broken_lifeline, tls
        )

    @property
    def reports(self) -> list[AgentReport]:
        """The answers to `hello` of the known agents."""
        return list(self._known.values())

    def refresh(self, epoch: int) -> None:
        """Send `hello` to every agent that is unknown or not ready and has no open `hello`."""
        self._epoch = epoch
        for seat in self._agents.seats:
            report = self._known.get(seat)
            pending = self._pending.get(seat)
            if (report is None or not report.ready) and (pending is None or pending.done()):
                self._send_hello(seat, epoch)
            if seat not in self._seats_seen:
                self._seats_seen.add(seat)
                self._expect_lease_end(seat, "", self._lapse_s)
        self._report_ended_leases()

    @property
    def some_start(self) -> bool:
        """Whether an agent answers that still starts its processes, and began to not long ago."""
        return any(self._starts(report) for report in tuple(self._known.values()))

    def ask_starting(self, epoch: int) -> None:
        """Send `hello` to the agents that still start their processes: a world waits for them."""
        for seat, report in tuple(self._known.items()):
            pending = self._pending.get(seat)
            if self._starts(report) and (pending is None or pending.done()):
                self._send_hello(seat, epoch)

    def update(self, report: AgentReport) -> None:
        """Keep an agent's answer to another command: if it is not ready, its readiness is news."""
        known = self._known.get(report.agent)
        if known is not None and known.incarnation == report.incarnation:
            self._keep(report)

    def grant(self, grant: Grant, for_s: float) -> None:
        """Answer every heartbeat of an agent with this grant for `for_s` seconds; renew in time."""
        self._lifelines.grant(grant, for_s)

    def forget(self, seat: str, incarnation: str = "") -> ProcessIdentity | None:
        """Stop tracking this incarnation of the agent ("": the known incarnation). Returns its
        process, if that was ever known.

        Afterwards only the end of the incarnation or of its lease is reported, and whether its
        node lives.
        """
        known = self._known.get(seat)
        life = incarnation or (known.incarnation if known is not None else "")
        self._expect_lease_end(seat, life, self._times.heartbeat_timeout_s)
        if known is not None and known.incarnation == life:
            del self._known[seat]
            self._stop_watching(seat, life)
            self._silent[seat] = _SilentAgent(life)
            self._start_probe(seat, known.node_id)
        return self._processes.get(_lifeline_name(seat, life))

    def close(self) -> None:
        self._lifelines.close()
        for pool in (self._inquiry_pool, self._probe_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, report: AgentReport) -> None:
        known = self._known.get(report.agent)
        if known is None or known.incarnation != report.incarnation or known.ready:
            self._starting_until[report.agent] = clock_s() + self._times.starting_for_s
        self._known[report.agent] = report

    def _starts(self, report: AgentReport) -> bool:
        if report.ready or report.failure is not None:
            return False
        if any(finding.probe == SOFTWARE for finding in report.health.findings):
            return False  # this incarnation never will be ready
        return clock_s() < self._starting_until.get(report.agent, 0.0)

    def _send_hello(self, seat: str, epoch: int) -> Future[AgentReport]:
        request = Request(self._hello, epoch)
        call = self._agents.call(seat, request, AgentReport, timeout_s=self._times.hello_s)
        self._pending[seat] = call
        call.add_done_callback(lambda done: self._on_hello(seat, done))
        return call

    def _on_hello(self, seat: str, call: Future[AgentReport]) -> None:
        if call.cancelled() or call.exception() is not None:
            return  # not up yet; the next refresh repeats the call
        report = call.result()
        line = _lifeline_name(seat, report.incarnation)
        unnamed = ProcessIdentity("", report.pid, 0, report.node_id)  # no agent runs there
        self._processes[line] = report.process or unnamed
        known = self._known.get(seat)
        silent_agent = self._silent.get(seat)
        if silent_agent is not None and silent_agent.must_be_checked(report.incarnation):
            self._check(seat, silent_agent)
            return
        former = known if known is not None and known.incarnation != report.incarnation else None
        if former is not None:
            self._expect_lease_end(seat, former.incarnation, self._times.heartbeat_timeout_s)
        if known is None or _readiness(known) != _readiness(report):
            self._silent.pop(seat, None)
            self._lease_ends.pop((seat, report.incarnation), None)
            self._keep(report)
            self._submit_input(inputs.AgentUp(report))
        if former is not None:
            self._stop_watching(seat, former.incarnation)
        unwatched = known is None or former is not None or not known.data_port
        if report.data_port and unwatched:  # an agent of an unusable node has no port yet
            # Only now that the agent is known: the end of its lifeline may be reported at once.
            self._lifelines.watch(line, report.host, report.data_port)

    def _check(self, seat: str, silent_agent: _SilentAgent) -> None:
        """Check a node that comes back before reporting its agent."""
        request = Request(CheckNode(seat), self._epoch)
        call = self._agents.call(seat, request, AgentReport, timeout_s=self._times.check_s)
        self._pending[seat] = call  # no `hello` until the check ends

        def checked(done: Future[AgentReport]) -> None:
            # The result is in the next answer to `hello`; a failed check is repeated.
            silent_agent.checked = not done.cancelled() and done.exception() is None

        call.add_done_callback(checked)

    def _on_broken_lifeline(self, line: str, why: str) -> None:
        """Ask at once whether the process has ended; the lifeline connects again meanwhile."""
        self._start_inquiry(line, why, seat_answers=True)

    def _stop_watching(self, seat: str, incarnation: str) -> None:
        """Close the lifeline; the end of the process is still reported if it is near."""
        line = _lifeline_name(seat, incarnation)
        self._lifelines.forget(line)
        self._start_inquiry(line, "it was removed", seat_answers=False)

    def _start_inquiry(self, line: str, why: str, *, seat_answers: bool) -> None:
        if line not in self._inquiries:
            self._inquiries.add(line)
            with contextlib.suppress(RuntimeError):  # this watch is closing
                self._inquiry_pool.submit(self._inquire, line, why, seat_answers)

    def _inquire(self, line: str, why: str, seat_answers: bool) -> None:
        """Report the end of the process as soon as it is known. Ends without a report when the
        incarnation answers `hello`, or after `hello_s`."""
        seat, _, incarnation = line.partition(" ")
        pause_s, deadline = FIRST_INQUIRY_PAUSE_S, time.monotonic() + self._times.hello_s
        hello = self._send_hello(seat, self._epoch) if seat_answers else None
        try:
            while time.monotonic() < deadline:
                if self._has_ended(line):
                    self._on_process_end(line, why)
                    return
                if hello is not None and _answer_of(hello) == incarnation:
                    _log.info("lifeline_broken", agent=seat, why=why, outcome="the agent lives")
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_INQUIRY_PAUSE_S)
        finally:
            self._inquiries.discard(line)

    def _has_ended(self, line: str) -> bool:
        process = self._processes.get(line)
        if process is None:
            return False
        ended = linux_processes.has_ended(process)
        if ended is not None:
            return ended
        try:
            return self._agents.has_ended(line.partition(" ")[0], process)
        except Exception:  # any error of the cluster's client means: unknown
            return False

    def _on_process_end(self, line: str, why: str) -> None:
        seat, _, incarnation = line.partition(" ")
        self._lifelines.forget(line)
        if not self._lose(seat, incarnation, f"its process has ended ({why})", certain=True):
            self._lease_ends.pop((seat, incarnation), None)
            self._submit_input(inputs.LeaseEnded(seat, incarnation, certain=True))

    def _on_silence(self, line: str, why: str) -> None:
        seat, _, incarnation = line.partition(" ")
        lost = self._lose(seat, incarnation, f"connection to its process: {why}", certain=False)
        if lost and self._lapse_s is not None:
            # The silence lasted as long as a lease of this supervisor.
            self._submit_input(inputs.LeaseEnded(seat, incarnation))

    def _lose(self, seat: str, incarnation: str, why: str, *, certain: bool) -> bool:
        """Report the loss of a known agent. False if this incarnation is not the known one."""
        known = self._known.get(seat)
        if known is None or known.incarnation != incarnation:
            return False
        self._silent[seat] = _SilentAgent(incarnation)
        if self._known.pop(seat, None) is None:
            return False  # another thread has reported it
        lost = inputs.AgentLost(seat, why, incarnation, at=time.time(), certain=certain)
        self._submit_input(lost)
        self._start_probe(seat, known.node_id)
        return True

    def _expect_lease_end(self, seat: str, incarnation: str, in_s: float | None) -> None:
        """Report the end of the lease of this incarnation in `in_s`; "": of any older lease."""
        if in_s is not None and self._lapse_s is not None:
            self._lease_ends.setdefault((seat, incarnation), clock_s() + in_s)

    def _report_ended_leases(self) -> None:
        now = clock_s()
        for (seat, incarnation), until in tuple(self._lease_ends.items()):
            if now >= until and self._lease_ends.pop((seat, incarnation), None) is not None:
                self._submit_input(inputs.LeaseEnded(seat, incarnation))

    def _start_probe(self, seat: str, node_id: str) -> None:
        with contextlib.suppress(RuntimeError):  # this watch is closing
            self._probe_pool.submit(self._probe_node, seat, node_id)

    def _probe_node(self, seat: str, node_id: str) -> None:
        """Report whether the node was lost too.

        A dying node's raylet may outlive the agent by a moment, so a raylet that answers is probed
        again. The node counts as lost after two unanswered probes in a row, not after one.
        """
        finding, unanswered = "could not be probed", 0
        deadline = time.monotonic() + self._times.probe_s
        while time.monotonic() < deadline and unanswered < 2:
            try:
                answers = self._agents.node_answers(node_id)
            except Exception:  # any error of the cluster's client means: unknown
                break
            unanswered = 0 if answers else unanswered + 1
            finding = "answers" if answers else "does not answer"
            time.sleep(PROBE_PAUSE_S)
        evidence = f"the raylet of {seat}'s node {node_id[:12]} {finding}"
        self._submit_input(inputs.NodeStatus(seat, unanswered >= 2, evidence))


def _readiness(report: AgentReport) -> tuple[str, bool, bool]:
    return (report.incarnation, report.ready, report.failure is not None)


def _lifeline_name(seat: str, incarnation: str) -> str:
    return f"{seat} {incarnation}"


def _answer_of(hello: Future[AgentReport]) -> str:
    """The incarnation that has answered; "" if none has yet."""
    if not hello.done() or hello.cancelled() or hello.exception() is not None:
        return ""
    return hello.result().incarnation
