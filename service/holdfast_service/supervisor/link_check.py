"""Tests the network links of nodes that are new to a job, before the nodes get ranks.

A new node exchanges bytes with other nodes while its agent still starts, so the check costs no
time. An agent that does not answer the call yields no result: a link that was not measured is
neither good nor bad. A node is accused only after several failed tries; an accused node is tested
again later and cleared if its links work then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from holdfast_service.diagnosis.link_pairs import Pair, culprits, first_round, second_round
from holdfast_service.recovery.core_state.inputs import LinkChecked
from holdfast_service.supervisor.agent_watch import Agents
from holdfast_workers.protocol.answers import AgentReport, ExchangeResult
from holdfast_workers.protocol.commands import ExchangeBytes, Request

_log = structlog.get_logger()
TRIES = 3
"""Failed tries before a node is accused."""


class LinkChecker:
    """Calls `submit_input` from another thread, per accused node and per cleared node.

    `deadline_s`: of one exchange. `pause_s`: between tries. `recheck_s`: until an accused node is
    tested again.
    """

    def __init__(
        self,
        agents: Agents,
        submit_input: Callable[[LinkChecked], None],
        deadline_s: float,
        pause_s: float = 1.0,
        recheck_s: float = 30.0,
    ) -> None:
        self._agents = agents
        self._submit_input = submit_input
        self._deadline_s = deadline_s
        self._pause_s = pause_s
        self._recheck_s = recheck_s
        self._checked: dict[tuple[str, str], float] = {}  # until when the result holds (monotonic)
        self._accused: set[tuple[str, str]] = set()
        self._running: threading.Thread | None = None

    def refresh(self, reports: Sequence[AgentReport], epoch: int) -> None:
        """Start a round for new nodes, if a partner exists and no round is running."""
        if not self.wait(0.0):
            return
        now = time.monotonic()
        new = [
            report for report in reports if self._checked.get(_incarnation_key(report), now) <= now
        ]
        if not new or len(reports) < 2:
            return
        self._checked |= {_incarnation_key(report): math.inf for report in new}
        self._running = threading.Thread(
            target=self._run, args=(new, list(reports), epoch), name="exchanges", daemon=True
        )
        self._running.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the running round to end; True if it has ended."""
        if self._running is not None:
            self._running.join(timeout_s)
        return self._running is None or not self._running.is_alive()

    def _run(self, new: list[AgentReport], reports: list[AgentReport], epoch: int) -> None:
        problems: dict[str, str] = {}
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self._pause_s)
            problems, healthy = self._measure(new, reports, epoch)
            if not problems:
                break
        for report in reports:
            life = _incarnation_key(report)
            if report.agent in problems:
                self._accused.add(life)
                self._checked[life] = time.monotonic() + self._recheck_s
                self._submit_input(LinkChecked(*life, problems[report.agent]))
            elif life in self._accused and report in new:
                if report.agent in healthy:
                    self._accused.remove(life)
                    self._submit_input(LinkChecked(*life, ""))
                else:
                    self._checked[life] = time.monotonic() + self._recheck_s

    def _measure(
        self, new: list[AgentReport], reports: list[AgentReport], epoch: int
    ) -> tuple[dict[str, str], set[str]]:
        """Accused agents with their problems, and the agents with a successful exchange."""
        by_agent = {report.agent: report for report in reports}
        names = [report.agent for report in new]
        results: dict[Pair, bool] = {}
        problems: dict[Pair, str] = {}
        known = [agent for agent in by_agent if agent not in names]
        pairs = first_round(names, known)
        for _ in range(2):
            for pair, problem in self._exchange_pairs(pairs, by_agent, epoch).items():
                results[pair] = not problem
                problems[pair] = problem
            if all(results.values()):
                break
            pairs = second_round(results, known)
        accusations = {
            agent: "; ".join(
                sorted({why for pair, why in problems.items() if agent in pair and why})
            )
            for agent in culprits(results)
        }
        return accusations, {agent for pair, ok in results.items() if ok for agent in pair}

    def _exchange_pairs(
        self, pairs: list[Pair], by_agent: dict[str, AgentReport], epoch: int
    ) -> dict[Pair, str]:
        """Pair → its problem, "" if the exchange succeeded; all pairs at the same time."""
        calls: dict[Pair, Future[ExchangeResult]] = {}
        for agent, partner in pairs:
            there = by_agent[partner]
            request = Request(ExchangeBytes(there.host, there.data_port, self._deadline_s), epoch)
            calls[agent, partner] = self._agents.call(
                agent, request, ExchangeResult, timeout_s=2 * self._deadline_s
            )
        found: dict[Pair, str] = {}
        for pair, call in calls.items():
            try:
                found[pair] = call.result(3 * self._deadline_s).problem
            except Exception:  # the agent is gone or obeys another supervisor: no measurement
                _log.exception("the call to exchange bytes failed", agents=pair)
        return found


def _incarnation_key(report: AgentReport) -> tuple[str, str]:
    return report.agent, report.incarnation
