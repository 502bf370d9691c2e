"""Inspects every node of the cluster through Ray: facts, clock, storage, connections of all pairs.

A probe is an actor without resources on each living node, so it also runs on nodes that are full.
It belongs to this driver and ends with it. A node that does not answer in time is reported, and
delays the others no longer than the deadline.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast_service.cluster.refused_seat import requirement_of
from holdfast_service.cluster.runtime_env import OwnCode
from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.diagnosis.unfit_software import SoftwareFault, import_fault
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable
from holdfast_service.remote_tier.location import probe
from holdfast_workers.checkpoint.storage import StorageError
from holdfast_workers.errors import WorkersError
from holdfast_workers.health.node_facts import NodeFacts, clock_offset_s, connect_problem, measure
from holdfast_workers.ipc.listening import RANGE_VARIABLE, PortRange, listen
from holdfast_workers.memory.node_folder import memory_base
from holdfast_workers.memory.peer_tls import TLS_VARIABLE, TlsUnusable, peer_tls
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.protocol.processes import StorageOptions

CONNECT_S = 3.0
DAY_S = 86400.0
LOOK_S = 0.5
"""Time between two looks at the connection while nodes are awaited."""
ANSWERED_S = 0.01
"""Deadline for fetching an answer that is there."""
BACKLOG = 1024
UNKNOWN_CLOCK = (0.0, 0.0)
MOST_CONNECTIONS = 16
"""Connections that a probe tries at the same time."""


class NodeProbe:
    """Runs on the inspected node. Answers are plain values, so that a node with another version of
    Holdfast can answer."""

    def facts(self) -> dict[str, Any]:
        facts = measure(memory_base(os.environ), cache_folder(os.environ))
        return asdict(replace(facts, **_tls_facts(os.environ.get(TLS_VARIABLE, ""))))

    def now(self) -> float:
        return time.time()

    def listen(self, host: str) -> tuple[int, str]:
        """Accept connections at this address until the probe ends, on a port that agents of this
        node might use. Returns the port, and otherwise why there is none."""
        try:
            ports = PortRange.parse(os.environ.get(RANGE_VARIABLE, ""))
            listener = listen(host, ports, BACKLOG)
        except (OSError, WorkersError) as error:
            return 0, str(error)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1]), ""

    def unreachable(self, others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """The nodes to which this one cannot connect, and why."""
        with ThreadPoolExecutor(MOST_CONNECTIONS) as pool:
            problems = pool.map(lambda at: connect_problem(at, CONNECT_S), others.values())
            return {node: why for node, why in zip(others, problems, strict=True) if why}

    def storage_problem(self, uri: str, options: StorageOptions) -> str:
        """Why checkpoints cannot be written and read there; "": they can."""
        try:
            probe(uri, options)
        except StorageError as error:
            return str(error)
        return ""


def _tls_facts(folder: str) -> dict[str, Any]:
    if (tls := peer_tls(folder)) is None:
        return {}
    try:
        return {"tls": True, "tls_days": (tls.check() - time.time()) / DAY_S}
    except TlsUnusable as error:
        return {"tls": True, "tls_problem": str(error)}


def _accept(listener: socket.socket) -> None:
    while True:
        listener.accept()[0].close()


def inspect_nodes(
    store: tuple[str, StorageOptions] | None,
    deadline_s: float,
    code: OwnCode,
    is_lost: Callable[[], bool] = lambda: False,
) -> list[InspectedNode]:
    """One result per living node, within about `deadline_s`. `code`: what the nodes are to run.
    Blocks; raises errors of Ray, and ClusterUnavailable as soon as the connection `is_lost()`."""
    end = time.monotonic() + deadline_s
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    options = code.options()
    probes = {node: _probe(node, options) for node in nodes}
    try:
        return _Inspection(nodes, probes, end, is_lost, sends_code=code.is_sent).result(store)
    finally:
        if not is_lost():  # probes end with the connection, too
            for probe in probes.values():
                ray.kill(probe)


class _Inspection:
    """`end`: until when (monotonic) the nodes may answer."""

    def __init__(
        self,
        nodes: dict[str, Any],
        probes: dict[str, Any],
        end: float,
        is_lost: Callable[[], bool],
        *,
        sends_code: bool,
    ) -> None:
        self._nodes = nodes
        self._probes = probes
        self._end = end
        self._is_lost = is_lost
        self._sends_code = sends_code
        self._software: dict[str, SoftwareFault] = {}
        self._problems: dict[str, str] = {}

    def result(self, store: tuple[str, StorageOptions] | None) -> list[InspectedNode]:
        # Most of the time is for the start of the probes: a node has to start a process.
        facts = self._ask(lambda node: self._probes[node].facts.remote(), share=0.75)
        ports = self._ask(lambda node: self._probes[node].listen.remote(self._host(node)))
        at = {node: (self._host(node), port) for node, (port, _) in ports.items() if port}
        unreachable = self._ask(
            lambda node: self._probes[node].unreachable.remote(
                {other: where for other, where in at.items() if other != node}
            )
        )
        stored = {}
        if store is not None:
            stored = self._ask(lambda node: self._probes[node].storage_problem.remote(*store))
        clocks = {node: self._clock(node) for node in unreachable}
        return [
            InspectedNode(
                node=node,
                host=self._host(node),
                facts=None if node in self._problems else _read(facts[node]),
                problem=self._problems.get(node, ""),
                software=self._software.get(node),
                ray_gpus=float(self._nodes[node]["Resources"].get("GPU", 0.0)),
                clock_ahead_s=clocks.get(node, UNKNOWN_CLOCK)[0],
                clock_error_s=clocks.get(node, UNKNOWN_CLOCK)[1],
                listen_problem=ports.get(node, (0, ""))[1],
                unreachable=unreachable.get(node, {}),
                storage_problem=stored.get(node, ""),
            )
            for node in self._nodes
        ]

    def _host(self, node: str) -> str:
        return str(self._nodes[node]["NodeManagerAddress"])

    def _ask(self, call: Callable[[str], Any], share: float = 1.0) -> dict[str, Any]:
        """The answers of the nodes that have answered everything so far. `share`: the part of the
        time left that they have."""
        calls = {node: call(node) for node in self._nodes if node not in self._problems}
        limit = max(0.1, (self._end - time.monotonic()) * share)
        self._wait([*calls.values()], limit)
        answers = {}
        for node, reference in calls.items():
            try:
                answers[node] = ray.get(reference, timeout=ANSWERED_S)
            except GetTimeoutError:
                self._problems[node] = f"it did not answer within {limit:.0f} s"
            except RayError as error:
                self._record(node, error)
        return answers

    def _wait(self, calls: list[Any], limit_s: float) -> None:
        """Wait for all of the calls, at most for `limit_s`."""
        end = time.monotonic() + limit_s
        while calls and (left := end - time.monotonic()) > 0:
            if self._is_lost():
                raise ClusterUnavailable("the connection to Ray was lost during the check")
            calls = ray.wait(calls, num_returns=len(calls), timeout=min(left, LOOK_S))[1]

    def _record(self, node: str, error: RayError) -> None:
        self._problems[node] = _shortened(error)
        fault = import_fault(str(error), sends_code=self._sends_code, requirement_of=requirement_of)
        if fault is not None:
            self._software[node] = fault

    def _clock(self, node: str) -> tuple[float, float]:
        def there() -> float:
            call = self._probes[node].now.remote()
            self._wait([call], max(0.1, self._end - time.monotonic()))
            return float(ray.get(call, timeout=ANSWERED_S))

        try:
            return clock_offset_s(there)
        except RayError as error:
            self._record(node, error)
            return UNKNOWN_CLOCK


def _probe(node: str, code: dict[str, Any]) -> Any:
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    return ray.remote(NodeProbe).options(**options, **code).remote()


def _read(document: dict[str, Any]) -> NodeFacts:
    """The facts of a node, which may have another version: unknown fields are left out."""
    known = {field.name for field in fields(NodeFacts)}
    given = {name: _frozen(value) for name, value in document.items() if name in known}
    return NodeFacts(**given)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value


def _shortened(error: RayError) -> str:
    """The last line of Ray's message, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"it cannot be inspected: {lines[-1] if lines else type(error).__name__}"
