"""Who of a job's agents is there: introductions and lifelines, told as inputs of the core.

An agent is known from its answer to `hello` until its lifeline ends or it is let go. What a
lifeline tells is of one life of an agent, never taken for the next one's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast_service.recovery.core_state import inputs
from holdfast_workers.memory.lifeline import SILENCE, Lifelines
from holdfast_workers.protocol.lease import Grant, clock_s
from holdfast_workers.protocol.messages import AgentReport

PROBE_THREADS = 4
PROBE_PAUSE_S = 0.05


class Agents(Protocol):
    """The job's node agents, wherever they run."""

    @property
    def seats(self) -> list[str]: ...
    def ensure(self) -> None: ...
    def call(self, seat: str, method: str, *args: Any, timeout_s: float) -> Future[Any]: ...
    def restart(self, seat: str) -> None: ...
    def node_answers(self, node_id: str) -> bool: ...
    def draining(self) -> dict[str, float | None]:
        """Ids of nodes that are to be taken away, and when (None: not known)."""
        ...


@dataclass
class _SilentAgent:
    """Of an agent that is not known: which life was heard last."""

    incarnation: str
    checked: bool = False

    def must_be_checked(self, incarnation: str) -> bool:
        """Whether it is the life that was lost, and comes back as it is."""
        return self.incarnation == incarnation and not self.checked


class AgentWatch:
    """`submit_input` is called from several threads. Times in seconds: `hello_s` for an answer to `hello`,
    `probe_s` for how long a node is watched whose agent is lost, `check_s` for the check of a
    node that comes back; `lapse_s` for how long after a former supervisor's end an agent may have a
    lease of it (None: there are no leases). One of ours ends before its agent counts as silent."""

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
        """When the lease of an agent's life has ended that is not known: until it is told."""
        self._seats_seen: set[str] = set()
        """Seats of which a former supervisor may have known another life."""
        self._known: dict[str, AgentReport] = {}
        self._pending: dict[str, Future[Any]] = {}
        self._probe_pool = ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="node-enquiry")
        self._lifelines = Lifelines(secret, self._on_lifeline_end, heartbeat_timeout_s)

    @property
    def seats(self) -> list[str]:
        """Of the agents that are known."""
        return list(self._known)

    @property
    def reports(self) -> list[AgentReport]:
        """Of the agents that are known, as they first told of themselves."""
        return list(self._known.values())

    def known(self, seat: str) -> AgentReport | None:
        return self._known.get(seat)

    def refresh(self, epoch: int) -> None:
        """Ask every agent who it is that is not known, or not ready, or not asked at present."""
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
        """Answer every beat of an agent with this; to be said again before `for_s` is over."""
        self._lifelines.grant(grant, for_s)

    def forget(self, seat: str, incarnation: str = "") -> None:
        """Nothing more is told of this life of the agent ("": the one that is known), but when it
        has ended or its lease has, and whether its node lives."""
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
        call = self._agents.call(seat, "hello", epoch, timeout_s=self._hello_s)
        self._pending[seat] = call
        call.add_done_callback(lambda done: self._on_hello(seat, done))

    def _on_hello(self, seat: str, call: Future[Any]) -> None:
        if call.cancelled() or call.exception() is not None:
            return  # not up yet; it will be asked again
        report: AgentReport = call.result()
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
            # Not before it is known: its end may be told at once.
            self._lifelines.watch(_lifeline_name(report), report.host, report.data_port)

    def _check(self, seat: str, silent_agent: _SilentAgent) -> None:
        """A node that comes back is checked before anybody hears of it."""
        call = self._agents.call(seat, "check", self._epoch, timeout_s=self._check_s)
        self._pending[seat] = call  # until then it is not asked who it is

        def checked(done: Future[Any]) -> None:
            # What was found is in its next answer; one that was not checked is asked to be again.
            silent_agent.checked = not done.cancelled() and done.exception() is None

        call.add_done_callback(checked)

    def _on_lifeline_end(self, line: str, why: str) -> None:
        seat, _, incarnation = line.partition(" ")
        known = self._known.get(seat)
        if known is None or known.incarnation != incarnation:
            self._lease_ends.pop((seat, incarnation), None)
            if not why.startswith(SILENCE):
                self._submit_input(inputs.LeaseEnded(seat, incarnation, certain=True))  # it was let go
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
            self._submit_input(inputs.LeaseEnded(seat, incarnation))  # that is how long a silence lasts
        self._start_probe(seat, known.node_id)

    def _expect_lease_end(self, seat: str, incarnation: str, in_s: float | None) -> None:
        """The lease of this life ends by then; "": any that a former supervisor has granted."""
        if in_s is not None and self._lapse_s is not None:
            self._lease_ends.setdefault((seat, incarnation), clock_s() + in_s)

    def _report_ended_leases(self) -> None:
        now = clock_s()
        for (seat, incarnation), until in tuple(self._lease_ends.items()):
            if now >= until and self._lease_ends.pop((seat, incarnation), None) is not None:
                self._submit_input(inputs.LeaseEnded(seat, incarnation))

    def _start_probe(self, seat: str, node_id: str) -> None:
        with contextlib.suppress(RuntimeError):  # this watch is closing: nobody would listen
            self._probe_pool.submit(self._probe_node, seat, node_id)

    def _probe_node(self, seat: str, node_id: str) -> None:
        """Whether the node was lost too. A dying node's raylet may outlive the agent by a moment:
        as long as it answers, it is asked again. One silence proves nothing, two in a row do."""
        finding, unanswered = "could not be asked", 0
        deadline = time.monotonic() + self._probe_s
        while time.monotonic() < deadline and unanswered < 2:
            try:
                answers = self._agents.node_answers(node_id)
            except Exception:  # whatever the cluster's client raises means that it cannot say
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
