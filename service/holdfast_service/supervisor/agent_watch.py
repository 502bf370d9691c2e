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

from holdfast_service.recovery.core_state import inputs as say
from holdfast_workers.memory.lifeline import SILENCE, Lifelines
from holdfast_workers.protocol.lease import Grant, clock_s
from holdfast_workers.protocol.messages import AgentReport

ENQUIRIES = 4
ENQUIRY_PAUSE_S = 0.05


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
class _Silence:
    """Of an agent that is not known: which life was heard last."""

    incarnation: str
    checked: bool = False

    def must_be_checked(self, incarnation: str) -> bool:
        """Whether it is the life that was lost, and comes back as it is."""
        return self.incarnation == incarnation and not self.checked


class AgentWatch:
    """`tell` is called from several threads. Times in seconds: `hello_s` for an answer to `hello`,
    `enquiry_s` for how long a node is watched whose agent is lost, `check_s` for the check of a
    node that comes back; `lapse_s` for how long after a former supervisor's end an agent may have a
    lease of it (None: there are no leases). One of ours ends before its agent counts as silent."""

    def __init__(
        self,
        agents: Agents,
        secret: bytes,
        tell: Callable[[say.Input], None],
        *,
        heartbeat_timeout_s: float,
        hello_s: float,
        enquiry_s: float,
        check_s: float,
        lapse_s: float | None = None,
    ) -> None:
        self._agents = agents
        self._tell = tell
        self._hello_s = hello_s
        self._enquiry_s = enquiry_s
        self._check_s = check_s
        self._lapse_s = lapse_s
        self._epoch = 0
        self._silent: dict[str, _Silence] = {}
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._leases: dict[tuple[str, str], float] = {}
        """When the lease of an agent's life has ended that is not known: until it is told."""
        self._strange: set[str] = set()
        """Seats of which a former supervisor may have known another life."""
        self._known: dict[str, AgentReport] = {}
        self._asked: dict[str, Future[Any]] = {}
        self._enquiries = ThreadPoolExecutor(ENQUIRIES, thread_name_prefix="node-enquiry")
        self._lifelines = Lifelines(secret, self._lost, heartbeat_timeout_s)

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

    def look(self, epoch: int) -> None:
        """Ask every agent who it is that is not known, or not ready, or not asked at present."""
        self._epoch = epoch
        for seat in self._agents.seats:
            report = self._known.get(seat)
            asked = self._asked.get(seat)
            if (report is None or not report.ready) and (asked is None or asked.done()):
                self._introduce(seat, epoch)
            if seat not in self._strange:
                self._strange.add(seat)
                self._expect_end(seat, "", self._lapse_s)
        self._tell_ended()

    def grant(self, grant: Grant, for_s: float) -> None:
        """Answer every beat of an agent with this; to be said again before `for_s` is over."""
        self._lifelines.grant(grant, for_s)

    def forget(self, seat: str, incarnation: str = "") -> None:
        """Nothing more is told of this life of the agent ("": the one that is known), but when it
        has ended or its lease has, and whether its node lives."""
        known = self._known.get(seat)
        life = incarnation or (known.incarnation if known is not None else "")
        self._expect_end(seat, life, self._heartbeat_timeout_s)
        if known is not None and known.incarnation == life:
            del self._known[seat]
            self._lifelines.forget(_line(known))
            self._silent[seat] = _Silence(life)
            self._enquire_soon(seat, known.node_id)

    def close(self) -> None:
        self._lifelines.close()
        self._enquiries.shutdown(wait=False, cancel_futures=True)

    def _introduce(self, seat: str, epoch: int) -> None:
        call = self._agents.call(seat, "hello", epoch, timeout_s=self._hello_s)
        self._asked[seat] = call
        call.add_done_callback(lambda done: self._introduced(seat, done))

    def _introduced(self, seat: str, call: Future[Any]) -> None:
        if call.cancelled() or call.exception() is not None:
            return  # not up yet; it will be asked again
        report: AgentReport = call.result()
        known = self._known.get(seat)
        silence = self._silent.get(seat)
        if silence is not None and silence.must_be_checked(report.incarnation):
            self._check(seat, silence)
            return
        former = known if known is not None and known.incarnation != report.incarnation else None
        if former is not None:
            self._expect_end(seat, former.incarnation, self._heartbeat_timeout_s)
        if known is None or _standing(known) != _standing(report):
            self._silent.pop(seat, None)
            self._leases.pop((seat, report.incarnation), None)
            self._known[seat] = report
            self._tell(say.AgentUp(report))
        if former is not None:
            self._lifelines.forget(_line(former))
        if known is None or former is not None:
            # Not before it is known: its end may be told at once.
            self._lifelines.watch(_line(report), report.host, report.data_port)

    def _check(self, seat: str, silence: _Silence) -> None:
        """A node that comes back is checked before anybody hears of it."""
        call = self._agents.call(seat, "check", self._epoch, timeout_s=self._check_s)
        self._asked[seat] = call  # until then it is not asked who it is

        def checked(done: Future[Any]) -> None:
            # What was found is in its next answer; one that was not checked is asked to be again.
            silence.checked = not done.cancelled() and done.exception() is None

        call.add_done_callback(checked)

    def _lost(self, line: str, why: str) -> None:
        seat, _, incarnation = line.partition(" ")
        known = self._known.get(seat)
        if known is None or known.incarnation != incarnation:
            self._leases.pop((seat, incarnation), None)
            if not why.startswith(SILENCE):
                self._tell(say.LeaseEnded(seat, incarnation, certain=True))  # it was let go
            return
        self._silent[seat] = _Silence(incarnation)
        del self._known[seat]
        certain = not why.startswith(SILENCE)
        self._tell(
            say.AgentLost(
                agent=seat,
                why=f"connection to its process: {why}",
                incarnation=incarnation,
                at=time.time(),
                certain=certain,
            )
        )
        if not certain and self._lapse_s is not None:
            self._tell(say.LeaseEnded(seat, incarnation))  # that is how long a silence lasts
        self._enquire_soon(seat, known.node_id)

    def _expect_end(self, seat: str, incarnation: str, in_s: float | None) -> None:
        """The lease of this life ends by then; "": any that a former supervisor has granted."""
        if in_s is not None and self._lapse_s is not None:
            self._leases.setdefault((seat, incarnation), clock_s() + in_s)

    def _tell_ended(self) -> None:
        now = clock_s()
        for (seat, incarnation), until in tuple(self._leases.items()):
            if now >= until and self._leases.pop((seat, incarnation), None) is not None:
                self._tell(say.LeaseEnded(seat, incarnation))

    def _enquire_soon(self, seat: str, node_id: str) -> None:
        with contextlib.suppress(RuntimeError):  # this watch is closing: nobody would listen
            self._enquiries.submit(self._enquire, seat, node_id)

    def _enquire(self, seat: str, node_id: str) -> None:
        """Whether the node was lost too. A dying node's raylet may outlive the agent by a moment:
        as long as it answers, it is asked again. One silence proves nothing, two in a row do."""
        words, silences = "could not be asked", 0
        deadline = time.monotonic() + self._enquiry_s
        while time.monotonic() < deadline and silences < 2:
            try:
                answers = self._agents.node_answers(node_id)
            except Exception:  # whatever the cluster's client raises means that it cannot say
                break
            silences = 0 if answers else silences + 1
            words = "answers" if answers else "does not answer"
            time.sleep(ENQUIRY_PAUSE_S)
        evidence = f"the raylet of {seat}'s node {node_id[:12]} {words}"
        self._tell(say.NodeStatus(seat, silences >= 2, evidence))


def _standing(report: AgentReport) -> tuple[str, bool, bool]:
    return (report.incarnation, report.ready, report.failure is not None)


def _line(report: AgentReport) -> str:
    return f"{report.agent} {report.incarnation}"
