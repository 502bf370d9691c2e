"""A small cluster with faults, for testing a recovery core: see `simulated_training`.

A watchdog checks the invariants of the core after every input and raises an AssertionError if a
check fails. All randomness comes from a single seed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from tests.support.simulation.simulated_agent import SimAgent
from tests.support.simulation.simulated_network import MISSED_S
from tests.support.simulation.simulated_stalls import SimulatedStalls

from holdfast_service.policy.quarantine import Avoided, NodeStanding, node_name
from holdfast_service.recovery.core import RecoveryCore
from holdfast_service.recovery.core_state import inputs
from holdfast_service.recovery.core_state.event_replay import Facts
from holdfast_service.recovery.core_state.roster import AgentIncarnation
from holdfast_workers.protocol.findings import HealthFinding, HealthReport, Level
from holdfast_workers.protocol.messages import ErrorKind
from holdfast_workers.protocol.signals import NodeUnwell, PartnerLost, StoreLost, WorkerExited

REPEAT_S = 4.0
"""Between two comparisons of the orders: longer than the greatest delay of an order."""


FULL_DISK = HealthFinding("host", "disk", Level.UNFIT, "no space")


class SimulatedCluster(SimulatedStalls):
    """Schedule faults with `at(...)`, then `run()` until the job has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.installed_build = ""
        """The build of Holdfast of processes that start from now on."""
        self.builds: dict[AgentIncarnation, str] = defaultdict(str)

    # --- faults -------------------------------------------------------------------------------

    def kill_worker(
        self,
        agent_name: str,
        index: int = 0,
        ended_by: str = "SIGKILL",
        out_of_memory: str = "",
    ) -> None:
        """End one of the agent's workers, seated or warm, by a signal or with an exit code."""
        agent = self.agents[agent_name]
        names = sorted(agent.workers)
        if agent.alive and names:
            worker = agent.workers.pop(names[index % len(names)])
            key, _, code = ended_by.rpartition(" ")
            exited = WorkerExited(exit_code=int(code)) if key else WorkerExited(name=ended_by)
            self._exited(agent, worker, replace(exited, out_of_memory=out_of_memory))
            self._break_collectives(worker.attempt)

    def kill_rank(self, rank: int, ended_by: str = "SIGKILL", out_of_memory: str = "") -> None:
        """End the worker that has the rank now."""
        for agent in self.agents.values():
            for worker in list(agent.workers.values()):
                if worker.rank == rank and worker.attempt == max(self.worlds, default=0):
                    index = sorted(agent.workers).index(worker.name)
                    self.kill_worker(agent.name, index, ended_by, out_of_memory)
                    return

    def kill_agent(
        self,
        name: str,
        back_after_s: float | None = 1.0,
        *,
        node: bool = False,
        removed: bool = False,
    ) -> None:
        """The agent's process and its workers die; its memory segments stay. With `removed`, the
        core ordered the death and learns of it only by the end of the lease."""
        agent = self.agents[name]
        if not agent.alive:
            return
        attempts = {worker.attempt for worker in agent.workers.values()}
        life = agent.incarnation
        agent.die()
        lost = inputs.AgentLost(name, "its process died", incarnation=life)
        ended = inputs.LeaseEnded(name, life, certain=True)
        seen_after_s = self.random.uniform(0, 0.5)
        self.at(seen_after_s, lambda: self.send(ended if removed else lost))
        word = inputs.NodeStatus(
            name, node, f"the raylet {'does not answer' if node else 'answers'}"
        )
        self.at(seen_after_s + 0.05, lambda: self.send(word))
        for attempt in attempts:
            self._break_collectives(attempt)
        if back_after_s is not None:
            self.at(back_after_s, lambda: self.restart_agent(agent, life))

    def _remove(self, life: str, agent: SimAgent) -> None:
        """Kill this life of the agent, and no later one."""
        if agent.incarnation == life:
            self.kill_agent(agent.name, removed=True)

    def kill_node(self, name: str, back_after_s: float | None = 20.0) -> None:
        """The node and all its memory are gone; an empty node may replace it."""
        agent = self.agents[name]
        if not agent.alive:
            return
        self.kill_agent(name, back_after_s, node=True)
        agent.forget()

    def order_size(self, nodes: int | None, *, is_held: bool = False) -> None:
        """The control plane orders a size; it tells it to each later supervisor as well."""
        self._send_order(inputs.SizeOrdered(nodes, is_held))

    def _send_order(self, order: inputs.SizeOrdered | inputs.NodesAvoided) -> None:
        self.orders_wanted[type(order)] = order
        self.send(order)
        self.at(REPEAT_S, partial(self._repeat_order, type(order)))

    def _repeat_order(self, kind: type[inputs.Input]) -> None:
        """The control plane sees in each report which order the supervisor has taken last."""
        wanted = self.orders_wanted[kind]
        if self.orders_taken.get(kind) != wanted:
            self.send(wanted)
            self.at(REPEAT_S, partial(self._repeat_order, kind))

    def keep_seats(self, seats: frozenset[str] | None) -> None:
        """The cluster takes back the nodes of the other seats, and later brings empty ones."""
        for agent in self.agents.values():
            if seats is not None and agent.name not in seats and agent.alive:
                newest = max(self.worlds, default=0)
                hosts = {host.name for _, host, _ in self.members_of(newest)} if newest else set()
                assert agent.name not in hosts, f"{agent.name} has ranks"
                self.kill_node(agent.name, back_after_s=None)
                self.given_back.add(agent.name)
            elif seats is None and agent.name in self.given_back:
                self.given_back.discard(agent.name)
                self.at(1.0, partial(self.restart_agent, agent, agent.incarnation))

    def drain_node(self, name: str, in_s: float = 5.0) -> None:
        """The cluster announces the removal of the node and removes it; an empty node replaces
        it."""
        agent = self.agents[name]
        node = agent.report().node_id
        self.send(inputs.NodesDraining({node: self.now + in_s}))

        def go() -> None:
            if agent.alive:
                self.kill_node(name, back_after_s=5.0)
            elif agent.report().node_id == node:
                self.at(0.5, go)

        self.at(in_s, go)

    def set_aside(self, name: str, for_s: float, standing: NodeStanding) -> None:
        """The control plane avoids this node, and no other, for a while."""
        report = self.agents[name].report()
        named = node_name(report.node_id, report.host)
        self._send_order(inputs.NodesAvoided({named: Avoided(standing, "for a while")}))
        self.at(for_s, lambda: self._send_order(inputs.NodesAvoided({})))

    def fall_ill(self, name: str, for_s: float, finding: HealthFinding = FULL_DISK) -> None:
        """The agent finds its node unfit, and fit again after a while."""
        agent = self.agents[name]
        life = agent.incarnation

        def report(*findings: HealthFinding) -> None:
            if agent.alive and agent.incarnation == life:
                agent.health, agent.findings = agent.health + 1, findings
                health = HealthReport(agent.health, findings)
                self.signal(agent, NodeUnwell(health), agent.known_attempt)

        report(finding)
        self.at(for_s, report)

    def lose_link(self, name: str, for_s: float) -> None:
        """The network check of the agent's node fails, and succeeds after a while."""
        life = self.agents[name].incarnation
        self.send(inputs.LinkChecked(name, life, "refused"))
        self.at(for_s, lambda: self.send(inputs.LinkChecked(name, life, "")))

    def cut_off(self, name: str, for_s: float, noticed_after_s: float = 3.0) -> None:
        """A partition: the agent lives but is unreachable for a while."""
        agent = self.agents[name]
        if not (agent.alive and agent.reachable):
            return
        self._grant_leases()
        agent.reachable = False
        life = agent.incarnation

        def notice() -> None:
            if not agent.reachable and agent.incarnation == life:
                silent = inputs.AgentLost(name, "does not answer", incarnation=life, certain=False)
                self.feed(silent)
                self._send_lease_end(name, life, 0.0)

        def heal() -> None:
            agent.reachable = True
            for signal in agent.unsent:
                self.send(inputs.Signals((signal,)))
            agent.unsent.clear()
            self._announce_agent(agent)

        self.at(noticed_after_s, notice)
        self.at(for_s, heal)
        self._deliver_late(agent)

    def reset(self, name: str, for_s: float = 0.0, noticed_after_s: float = MISSED_S) -> None:
        """A device on the path resets the agent's lifeline, and refuses it for `for_s`. The agent
        lives, and all other messages arrive."""
        agent = self.agents[name]
        if not (agent.alive and agent.reachable and agent.beats):
            return
        self._grant_leases()
        agent.beats = False
        agent.silences += 1
        life = agent.incarnation

        def reconnect() -> None:
            agent.beats = True
            if agent.counts_as_lost and agent.incarnation == life:
                self._announce_agent(agent)
            agent.counts_as_lost = False

        self._notice_silence(agent, noticed_after_s)
        self.at(for_s + self.random.uniform(0.0, 0.05), reconnect)
        self._deliver_late(agent)

    def _deliver_late(self, agent: SimAgent) -> None:
        """The peers' contributions to the step agreement were on their way when the link was cut,
        and arrive later: the agreed step is then applied, if the lease still allows it."""
        attempt = max(self.worlds, default=0)
        mine = (
            [worker for _, host, worker in self.members_of(attempt) if host is agent]
            if attempt
            else []
        )

        def deliver() -> None:
            there = [
                worker
                for worker in mine
                if worker is not None and self._is_in(agent, worker, attempt)
            ]
            if there and self._may_step(agent, attempt):
                self.watchdog.committed(attempt, there[0].step + 1)

        for _ in range(4):
            self.at(self.random.uniform(0.0, 6.0), deliver)

    def make_copies_unreadable(self, name: str) -> None:
        """The memory checkpoints of this agent are listed but cannot be loaded."""
        self.agents[name].copies_unreadable = True
        self.at(6.0, lambda: setattr(self.agents[name], "copies_unreadable", False))

    def lose_signals(self, name: str, for_s: float) -> None:
        """The agent's signals are lost for a while; it still answers polls."""
        agent = self.agents[name]
        agent.loses_signals = True
        self.at(for_s, lambda: setattr(agent, "loses_signals", False))
        self._poll(agent)

    def _poll(self, agent: SimAgent) -> None:
        """Poll the agent every second, like a supervisor."""
        if self.ended is not None:
            return
        if agent.alive and agent.reachable:
            report = agent.report()
            seen = inputs.WorkersPolled(
                agent.name,
                report.incarnation,
                report.workers,
                report.shards,
                tuple(agent.failed_shards),
                report.health,
            )
            self.send(seen)
        self.at(1.0, lambda: self._poll(agent))

    def lose_next_worker(self, name: str) -> None:
        """The next worker of this agent that should join never arrives."""
        self.agents[name].loses_next_worker = True

    def lose_store(self, name: str, for_s: float) -> None:
        """The agent's rendezvous store ends; its zygote forks the next one after `for_s`."""
        agent = self.agents[name]
        if not agent.alive or not agent.store:
            return
        port, agent.store = agent.store_port, 0
        self.signal(agent, StoreLost(port), agent.known_attempt)
        life = agent.incarnation

        def return_store() -> None:
            if agent.alive and agent.incarnation == life:
                agent.start_store()
                self._greet(agent, life)

        self.at(for_s, return_store)

    def _greet(self, agent: SimAgent, life: str) -> None:
        """The supervisor greets an agent that was not ready until it answers."""
        if agent.alive and agent.incarnation == life:
            self._announce_agent(agent)
            if not agent.reachable:
                self.at(0.5, partial(self._greet, agent, life))

    def break_link(self, rank: int, for_s: float = 2.0) -> None:
        """The rank's replication fails for a while, though its partner lives."""
        attempt = max(self.worlds, default=0)
        for at, agent, worker in self.members_of(attempt) if attempt else ():
            if at == rank and worker is not None and self._is_in(agent, worker, attempt):
                partner = next(iter(agent.partners.get(rank, ())), "")
                agent.broken.add(partner)
                self.at(for_s, partial(agent.broken.discard, partner))
                lost = PartnerLost(partner, "timed out")
                self.signal(agent, lost, attempt, rank=rank, worker=worker.name)

    def glitch(self) -> None:
        """Every rank's collective fails, although no process has died."""
        self._break_collectives(max(self.worlds, default=0))

    def restart_supervisor(self) -> None:
        """The core is lost; a new one starts from the journal and the agents' reports."""
        if self.ended is not None:
            return
        for agent in self.agents.values():
            self._supervisor_ended(agent)
        self.supervisor += 1
        facts = Facts.from_events(self.events)
        remotes = tuple(self.remotes.values())
        config = replace(self.config, remotes=remotes, build=self.installed_build)
        self.core = RecoveryCore(config, self.now, facts)
        self.watchdog.supervisor_restarted()
        for agent in self.agents.values():
            self._send_lease_end(agent.name, "", self.config.lapse_s)
            self.at(self.random.uniform(0.0, 0.3), partial(self._announce_agent, agent))
        self.orders_taken.clear()
        for kind in self.orders_wanted:
            self.at(1.0, partial(self._repeat_order, kind))

    def restart_agent(self, agent: SimAgent, life: str) -> None:
        is_wanted = agent.name not in self.given_back
        if not agent.alive and agent.incarnation == life and is_wanted:
            agent.start_again()
            agent.build = self.builds[agent.name, agent.incarnation] = self.installed_build
            self._boot(agent)

    def _break_collectives(self, attempt: int) -> None:
        """The survivors' collectives break."""
        for _, agent, worker in self.members_of(attempt) if attempt in self.worlds else ():
            if worker is not None and self._is_in(agent, worker, attempt):
                self.fail_worker(
                    agent, worker, ErrorKind.COMMUNICATION, "connection closed by peer"
                )
