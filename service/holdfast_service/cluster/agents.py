"""The supervisor's access to a job's node agents on Ray: named seats that answer calls.

The placement group holds one node-sized bundle per training and standby node, spread strictly;
Ray places the bundle of a dead node again when a node is free, and restarts the agent in it. The
seats of an elastic job have a group each (`cluster/seat_groups.py`), and agents as far as placed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import ray
import structlog
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast_service.cluster import actor_names as names
from holdfast_service.cluster import code_by_value, refused_seat
from holdfast_service.cluster.agent_actor import AgentSeat
from holdfast_service.cluster.occupied import NODE_ID_LABEL, occupied
from holdfast_service.cluster.ray_state import (
    ControlServiceAway,
    RayNode,
    draining_nodes,
    has_ended,
    require_control_service,
    runs,
)
from holdfast_service.cluster.ray_state import nodes as ray_nodes
from holdfast_service.cluster.runtime_env import sent_modules, with_code
from holdfast_service.cluster.seat_groups import PENDING, SeatGroups
from holdfast_service.job_model.node_labels import selector_of
from holdfast_service.job_model.node_needs import needs_of
from holdfast_service.job_model.supervisor_protocol import JobPlan
from holdfast_service.policy.quarantine import NodeStanding, node_name
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import accepted
from holdfast_workers.protocol.commands import Request
from holdfast_workers.protocol.process_identity import ProcessIdentity
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.protocol.run_plan import RunPlan
from holdfast_workers.spec import RankResources

_log = structlog.get_logger()

Expected = TypeVar("Expected")
T = TypeVar("T")

PLACEMENT_TIMEOUT_S = 3.0
"""How long placement leaves out the last choice of nodes: then these are used too. A job that
has to keep off reserved nodes and finds no place for so long has none."""

SEAT_RELEASE_S = 5.0
SEAT_PASS_S = 0.25
"""Pause between two looks at the seats of an elastic job."""

HEAD_PAUSE_S = 1.0
"""Pause before a control service that is away is asked again."""

HEARTBEAT_FRACTION = 1 / 8
"""Heartbeat interval of an agent, as a fraction of the timeout that makes it count as lost."""


class RayAgents:
    """Creates or adopts the agents of one job, and calls them with deadlines."""

    def __init__(self, plan: JobPlan, secret: bytes, storage: StorageOptions) -> None:
        self._plan = plan
        self._installation = plan.installation
        self._job_id = plan.job_id
        self._spec = plan.spec
        self._secret = secret
        self._storage = storage
        self._handles: dict[str, Any] = {}
        self._closing = threading.Event()
        self._nodes: dict[str, RayNode] = {}
        """The nodes as last read, by id."""
        self._kept: frozenset[str] | None = None
        self._reserved = frozenset(plan.reserved)
        """Ids of the reserved nodes; empty once the job has its place."""
        self._others_wait_for = self._reserved
        self._pool = ThreadPoolExecutor(48, thread_name_prefix="agent-call")
        # Apart: a restart waits for Ray's control service, which no other command needs.
        self._restart_pool = ThreadPoolExecutor(4, thread_name_prefix="agent-restart")

    @property
    def seats(self) -> list[str]:
        return [f"n{index}" for index in range(self._spec.nodes)]

    def ensure(self) -> bool:
        """Create the placement group and the agents, or adopt those with the same names. Waits
        while Ray's head is away: nothing can be known then. False: the job finds no place off the
        nodes that are reserved for others, and must not stay."""
        if self._once_head_answers(self._ensure) is False:
            return False
        self._reserved = frozenset()
        return True

    def _ensure(self) -> bool:
        require_control_service()
        if self._spec.resources.nodes is not None:
            return self._keep_seats()
        group = self._placement_group()
        if group is None:
            return False
        for index, seat in enumerate(self.seats):
            name = names.agent(self._job_id, seat)
            self._handles[seat] = self._create(group, index, seat, name)
        return True

    def call(
        self, seat: str, request: Request, answer: type[Expected], *, timeout_s: float
    ) -> Future[Expected]:
        """Send a request to an agent; the future raises errors of Ray, or RequestRefused."""
        return self._pool.submit(self._call, seat, request, answer, timeout_s)

    def restart(self, seat: str, process: ProcessIdentity) -> None:
        """Kill this process of the agent, if it still lives; Ray starts the agent again. Returns at
        once."""
        self._restart_pool.submit(self._restart, seat, process)

    def keep_seats(self, seats: frozenset[str] | None) -> None:
        """Keep these seats of an elastic job. The next pass over the seats carries it out."""
        self._kept = seats

    def grow_off(self, nodes: Sequence[str]) -> None:
        """Grow off the nodes with these ids, for which other jobs wait: an elastic job takes none
        of them beyond those that it needs."""
        self._others_wait_for = frozenset(nodes)

    def has_ended(self, seat: str, process: ProcessIdentity) -> bool:
        """Whether Ray knows that this process of the agent has ended; blocks for the GCS."""
        return has_ended(self._handles[seat], process)

    def close(self) -> None:
        self._closing.set()
        for pool in (self._pool, self._restart_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def node_answers(self, node_id: str) -> bool:
        """True if the node's raylet accepts connections; faster than the GCS, and without it where
        the node was known before. Raises ControlServiceAway if nothing is known."""
        with contextlib.suppress(RayError, ConnectionError):  # then as they were known before
            self._nodes = {node.node_id: node for node in ray_nodes()}
        node = self._nodes.get(node_id)
        if node is None:
            require_control_service()
            return False
        try:
            socket.create_connection((node.host, node.port), timeout=0.1).close()
        except OSError:
            return False
        return node.alive

    def draining(self) -> dict[str, float | None]:
        return draining_nodes()

    def _call(
        self, seat: str, request: Request, answer: type[Expected], timeout_s: float
    ) -> Expected:
        reference = self._handles[seat].execute.remote(codec.encode(request))
        found = ray.get(reference, timeout=timeout_s)
        if isinstance(found, dict):
            sends_code = bool(sent_modules())
            report = refused_seat.answer_of(seat, request, found, sends_code=sends_code)
            found = codec.encode(report)
        return accepted(found, answer)

    def _restart(self, seat: str, process: ProcessIdentity) -> None:
        def restart() -> None:
            if runs(self._handles[seat], process):
                ray.kill(self._handles[seat], no_restart=False)

        try:
            self._once_head_answers(restart)
        except Exception:  # Ray cannot be asked, or the actor is already gone
            _log.exception("cannot restart an agent", agent=seat)

    def _once_head_answers(self, action: Callable[[], T]) -> T | None:
        """Repeat the action until Ray's control service answers it, or these agents are closed."""
        while not self._closing.is_set():
            try:
                return action()
            except ControlServiceAway:
                self._closing.wait(HEAD_PAUSE_S)
        return None

    def _keep_seats(self) -> bool:
        """Place the seats of an elastic job, now and as nodes come and go. False: too few find a
        place off the reserved nodes."""
        groups = SeatGroups(
            self._installation,
            self._job_id,
            self.seats,
            self._is_kept,
            self._bundle(),
            selector_of(self._spec.resources.label_rules),
            lambda: [*self._node_ids_with(NodeStanding.CORDONED), *self._left_to_others()],
        )
        self._place_seats(groups)
        if self._handles:  # of a former supervisor: the job may have trained
            self._reserved = frozenset()

        def keep() -> None:
            while not self._closing.wait(SEAT_PASS_S):
                try:
                    self._place_seats(groups)
                except ControlServiceAway:
                    pass  # nothing is placed while Ray's head is away
                except Exception:  # the cluster does not answer; the next pass repeats it
                    _log.exception("cannot place the seats of a job", job=self._job_id)

        threading.Thread(target=keep, name="seat-groups", daemon=True).start()
        return not self._reserved or self._finds_a_place()

    def _finds_a_place(self) -> bool:
        """Whether as many seats as an elastic job needs are placed, one soon after the other."""
        placed, until = -1, 0.0
        while (now := len(self._handles)) < self._spec.needed_nodes:
            if now > placed or self._head_is_away():
                placed, until = now, time.monotonic() + PLACEMENT_TIMEOUT_S
            elif time.monotonic() > until:
                return False
            time.sleep(SEAT_PASS_S)
        return True

    def _head_is_away(self) -> bool:
        try:
            require_control_service()
        except ControlServiceAway:
            return True
        return False

    def _left_to_others(self) -> frozenset[str]:
        """The nodes on which an elastic job asks for no seat. One that has fewer nodes than it
        needs may have any: it goes before the jobs of the queue."""
        if len(self._handles) >= self._spec.needed_nodes:
            return self._others_wait_for
        return self._reserved

    def _place_seats(self, groups: SeatGroups) -> None:
        require_control_service()
        placed = groups.refresh(self._free_seat)
        for seat, group in placed.items():
            if seat not in self._handles:
                # The agent of a former group of this seat may not have ended yet.
                name = names.agent(self._job_id, f"{seat}:{group.id.hex()}")
                self._handles[seat] = self._create(group, 0, seat, name)

    def _is_kept(self, seat: str) -> bool:
        return self._kept is None or seat in self._kept

    def _free_seat(self, seat: str) -> None:
        """The group of this seat is to be removed, and Ray ends its actor. An agent whose seat is
        given back frees the shared memory of its node first."""
        handle = self._handles.pop(seat, None)
        if handle is not None and not self._is_kept(seat):
            ray.wait([handle.release.remote()], timeout=SEAT_RELEASE_S)

    def _placement_group(self) -> Any:
        """The placement group of the job; None if it has no place off the reserved nodes, and asks
        for none any more."""
        name = names.placement_group(self._installation, self._job_id)
        try:
            group = ray.util.get_placement_group(name)
        except ValueError:
            pass
        else:
            if not self._reserved or placement_group_table(group)["state"] != PENDING:
                return group
            ray.util.remove_placement_group(group)
            return None
        last = {*self._node_ids_with(NodeStanding.QUARANTINED), *self._plan.given} - self._reserved
        with occupied(self._reserved, self._installation):
            with occupied(last, self._installation) as any_last:
                group = placement_group(
                    [self._bundle()] * len(self.seats),
                    strategy="STRICT_SPREAD",
                    name=name,
                    lifetime="detached",
                    bundle_label_selector=self._label_selectors(),
                )
                if any_last:
                    group.wait(PLACEMENT_TIMEOUT_S)
            if not self._reserved:
                return group
            if group.wait(PLACEMENT_TIMEOUT_S):
                # A reserved node may have become free after its free CPUs were occupied.
                nodes = placement_group_table(group)["bundles_to_node_id"].values()
                if self._reserved.isdisjoint(nodes):
                    return group
            ray.util.remove_placement_group(group)
            return None

    def _label_selectors(self) -> list[dict[str, str]] | None:
        """A label selector for each bundle; None if any node will do."""
        ids = self._node_ids_with(NodeStanding.CORDONED)
        off = {NODE_ID_LABEL: f"!in({','.join(ids)})"} if ids else {}
        selector = {**selector_of(self._spec.resources.label_rules), **off}
        return [selector] * len(self.seats) if selector else None

    def _node_ids_with(self, standing: NodeStanding) -> list[str]:
        """Ray's ids of the living nodes with this standing."""
        names = {name for name, avoided in self._plan.avoid.items() if avoided.standing is standing}
        return [
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and node_name(node["NodeID"], node["NodeManagerAddress"]) in names
        ]

    def _bundle(self) -> dict[str, float]:
        return self._spec.resources.bundle

    def _create(self, group: Any, index: int, seat: str, name: str) -> Any:
        bundle = self._bundle()
        ray.cloudpickle.register_pickle_by_value(code_by_value)  # also for nodes without Holdfast
        actor = ray.remote(code_by_value.StartedAgent).options(
            name=name,
            namespace=names.namespace(self._installation),
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=16,
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
            **with_code(self._spec.code),
        )
        return actor.remote(codec.encode(self.seat_of(seat)), code_by_value.own_versions())

    def seat_of(self, seat: str) -> AgentSeat:
        """The arguments of a seat's agent."""
        plan, spec = self._plan, self._spec
        run = RunPlan(
            job_id=plan.job_id,
            spec=spec.training(),
            remote_root=plan.remote_root,
            resources=spec.resources.part(RankResources),
            timeouts=spec.timeouts,
            env=spec.env,
            packages=plan.packages,
            needs=needs_of(spec),
            heartbeat_s=spec.recovery.heartbeat_timeout_s * HEARTBEAT_FRACTION,
        )
        domains = spec.resources.domains
        return AgentSeat(run, seat, self._secret, self._storage, plan.installation, domains)
