"""Nodes that are new to a job exchange bytes with others, before they are ready for ranks.

While their agents still start, so that nobody waits for it. An agent that cannot be asked gives
no result: what is not measured is neither good nor bad. Nobody is accused for what may pass: it is
tried several times, and whoever was accused is tried again later, and cleared if all is well then.
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
from holdfast_workers.protocol.messages import AgentReport

_log = structlog.get_logger()
TRIES = 3
"""As often is it tried before anybody is accused."""


class LinkChecker:
    """`submit_input` is called from another thread, per culprit, and once one is none any more.
    `deadline_s`: of one exchange; `pause_s`: between tries; `recheck_s`: until the next look at a
    culprit."""

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
        self._checked: dict[tuple[str, str], float] = {}  # until when that holds
        self._accused: set[tuple[str, str]] = set()
        self._running: threading.Thread | None = None

    def refresh(self, reports: Sequence[AgentReport], epoch: int) -> None:
        """Begin with those who are new, if there is somebody to exchange with."""
        if not self.wait(0.0):
            return
        now = time.monotonic()
        new = [report for report in reports if self._checked.get(_incarnation_key(report), now) <= now]
        if not new or len(reports) < 2:
            return
        self._checked |= {_incarnation_key(item): math.inf for item in new}
        self._running = threading.Thread(
            target=self._run, args=(new, list(reports), epoch), name="exchanges", daemon=True
        )
        self._running.start()

    def wait(self, timeout_s: float) -> bool:
        """Until the round that is under way is over; whether it is."""
        if self._running is not None:
            self._running.join(timeout_s)
        return self._running is None or not self._running.is_alive()

    def _run(self, new: list[AgentReport], reports: list[AgentReport], epoch: int) -> None:
        problems: dict[str, str] = {}
        for tried in range(TRIES):
            if tried:
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
        """Culprits with what went wrong, and the agents that an exchange was well with."""
        by_agent = {report.agent: report for report in reports}
        names = [item.agent for item in new]
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
        """Pair → what went wrong, "" if nothing did; all at the same time."""
        calls: dict[Pair, Future[str]] = {
            (one, other): self._agents.call(
                one,
                "exchange",
                epoch,
                by_agent[other].host,
                by_agent[other].data_port,
                self._deadline_s,
                timeout_s=2 * self._deadline_s,
            )
            for one, other in pairs
        }
        found: dict[Pair, str] = {}
        for pair, call in calls.items():
            try:
                found[pair] = call.result(3 * self._deadline_s)
            except Exception:  # the agent is gone, or obeys another supervisor: nothing is measured
                _log.exception("an agent cannot be asked to exchange bytes", agents=pair)
        return found


def _incarnation_key(report: AgentReport) -> tuple[str, str]:
    return report.agent, report.incarnation
