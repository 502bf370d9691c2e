"""Tracks which agents of a job are alive, and reports changes as inputs of the core.

An agent is known from its answer to `hello` until its lifeline ends or the supervisor forgets it.
A lifeline belongs to one incarnation of an agent; its end is never attributed to the next
incarnation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast_service.recovery.core_state import inputs
from holdfast_workers.memory.lifeline import SILENCE, Lifelines
from holdfast_workers.protocol.answers import AgentReport
from holdfast_workers.protocol.commands import CheckNode, Hello, Request
from holdfast_workers.protocol.lease import Grant, clock_s

Expected = TypeVar("Expected")

PROBE_THREADS = 4
PROBE_PAUSE_S = 0.05


class Agents(Protocol):
    """The job's node agents, wherever they run."""

    @property
    def seats(self) -> list[str]: ...
    def ensure(self) -> None: ...
    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        """Send a request to an agent; the future raises errors of the agent or of the way to it."""
        ...

    def restart(self, seat: str) -> None: ...
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
    """Calls `submit_input` from several threads. Times are in seconds.

    `hello_s`: deadline of `hello`. `probe_s`: how long the node of a lost agent is probed.
    `check_s`: deadline of the check of a node that comes back. `lapse_s`: how long a lease of a
    former supervisor may outlive that supervisor (None: leases are off). A lease that this
    supervisor grants ends before its agent counts as silent.
    """

    def __init__(
        self,
        agents: Agents,
        secret: bytes,
        submit_input: Callable[[inputs.Input], None],
        *,
        heartbeat_timeout_s: float,
        hello_s: float,
        probe_s: float,
        check_s: float,
        lapse_s: float | None = None,
    ) -> None:
        self._agents = agents
        self._submit_input = submit_input
        self._hello_s = hello_s
        self._probe_s = probe_s
        self._check_s = check_s
        self._lapse_s = lapse_s
        self._epoch = 0
        self._silent: dict[str, _SilentAgent] = {}
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lease_ends: dict[tuple[str, str], float] = {}
        """(seat, incarnation) -> end of the lease of a lost incarnation; until it is reported."""
        self._seats_seen: set[str] = set()
        """Seats whose possible lease of a former supervisor is in `_lease_ends` already."""
        self._known: dict[str, AgentReport] = {}
        self._pending: dict[str, Future[AgentReport]] = {}
        self._probe_pool = ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="node-probe")
        self._lifelines = Lifelines(secret, self._on_lifeline_end, heartbeat_timeout_s)

    @property
    def seats(self) -> list[str]:
        """Seats of the known agents."""
        return list(self._known)

    @property
    def reports(self) -> list[AgentReport]:
        """The answers to `hello` of the known agents."""
        return list(self._known.values())

    def known(self, seat: str) -> AgentReport | None:
        return self._known.get(seat)

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

    def grant(self, grant: Grant, for_s: float) -> None:
        """Answer every heartbeat of an agent with this grant for `for_s` seconds; renew in time."""
        self._lifelines.grant(grant, for_s)

    def forget(self, seat: str, incarnation: str = "") -> None:
        """Stop tracking this incarnation of the agent ("": the known incarnation).

        Afterwards only the end of the incarnation or of its lease is reported, and whether its
        node lives.
        """
        known = self._known.get(seat)
        life = incarnation or (known.incarnation if known is not None else "")
        self._expect_lease_end(seat, life, self._heartbeat_timeout_s)
        if known is not None and known.incarnation == life:
            del self._known[seat]
            self._lifelines.forget(_lifeline_name(known))
            self._silent[seat] = _SilentAgent(life)
            self._start_probe(seat, known.node_id)

    def close(self) -> None:
        self._lifelines.close()
        self._probe_pool.shutdown(wait=False, cancel_futures=True)

    def _send_hello(self, seat: str, epoch: int) -> None:
        request = Request(Hello(), epoch)
        call = self._agents.call(seat, request, AgentReport, timeout_s=self._hello_s)
        self._pending[seat] = call
        call.add_done_callback(lambda done: self._on_hello(seat, done))

    def _on_hello(self, seat: str, call: Future[AgentReport]) -> None:
        if call.cancelled() or call.exception() is not None:
            return  # not up yet; the next refresh repeats the call
        report = call.result()
        known = self._known.get(seat)
        silent_agent = self._silent.get(seat)
        if silent_agent is not None and silent_agent.must_be_checked(report.incarnation):
            self._check(seat, silent_agent)
            return
        former = known if known is not None and known.incarnation != report.incarnation else None
        if former is not None:
            self._expect_lease_end(seat, former.incarnation, self._heartbeat_timeout_s)
        if known is None or _readiness(known) != _readiness(report):
            self._silent.pop(seat, None)
            self._lease_ends.pop((seat, report.incarnation), None)
            self._known[seat] = report
            self._submit_input(inputs.AgentUp(report))
        if former is not None:
            self._lifelines.forget(_lifeline_name(former))
        if known is None or former is not None:
            # Only now that the agent is known: the end of its lifeline may be reported at once.
            self._lifelines.watch(_lifeline_name(report), report.host, report.data_port)

    def _check(self, seat: str, silent_agent: _SilentAgent) -> None:
        """Check a node that comes back before reporting its agent."""
        request = Request(CheckNode(seat), self._epoch)
        call = self._agents.call(seat, request, AgentReport, timeout_s=self._check_s)
        self._pending[seat] = call  # no `hello` until the check ends

        def checked(done: Future[AgentReport]) -> None:
            # The result is in the next answer to `hello`; a failed check is repeated.
            silent_agent.checked = not done.cancelled() and done.exception() is None

        call.add_done_callback(checked)

    def _on_lifeline_end(self, line: str, why: str) -> None:
        seat, _, incarnation = line.partition(" ")
        known = self._known.get(seat)
        if known is None or known.incarnation != incarnation:
            self._lease_ends.pop((seat, incarnation), None)
            if not why.startswith(SILENCE):
                # The agent was forgotten before; its process has ended now.
                self._submit_input(inputs.LeaseEnded(seat, incarnation, certain=True))
            return
        self._silent[seat] = _SilentAgent(incarnation)
        del self._known[seat]
        certain = not why.startswith(SILENCE)
        self._submit_input(
            inputs.AgentLost(
                agent=seat,
                why=f"connection to its process: {why}",
                incarnation=incarnation,
                at=time.time(),
                certain=certain,
            )
        )
        if not certain and self._lapse_s is not None:
            # The silence lasted as long as a lease of this supervisor.
            self._submit_input(inputs.LeaseEnded(seat, incarnation))
        self._start_probe(seat, known.node_id)

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
        deadline = time.monotonic() + self._probe_s
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


def _lifeline_name(report: AgentReport) -> str:
    return f"{report.agent} {report.incarnation}"
