"""Finds what is wrong with the nodes of a cluster from what was measured on each. Pure.

The server compares its own versions with those of the nodes, and nodes with each other. Each fault
names its node, what was seen, and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_service.diagnosis.grades import Grade
from holdfast_service.diagnosis.unfit_software import SoftwareFault
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.health.node_facts import NodeFacts

MIB, GIB = 1 << 20, 1 << 30
SHARED_LEAST, SHARED_LOW = 128 * MIB, GIB
"""Containers have 64 MiB by default, which is less than one small job needs."""
CACHE_LEAST, CACHE_LOW = GIB, 10 * GIB
TASKS_LEAST, TASKS_LOW = 500, 4_000
"""A rank has some 60 processes and threads, an agent 100."""
FILES_LEAST, FILES_LOW = 1024, 4096
CERTIFICATE_LOW_DAYS = 30.0
CLOCK_ODD_S, CLOCK_BAD_S = 0.5, 5.0
"""Storage services refuse signatures of another quarter of an hour; times of events mislead."""


@dataclass(frozen=True)
class InspectedNode:
    """What the server learned about one node. `facts` None: it did not answer, for `problem`."""

    node: str
    host: str
    """Address of the node, as Ray knows it."""
    facts: NodeFacts | None = None
    problem: str = ""
    software: SoftwareFault | None = None
    """The software that it lacks, if that is the problem."""
    ray_gpus: float = 0.0
    clock_ahead_s: float = 0.0
    """Seconds by which the node's clock is ahead of the server's."""
    clock_error_s: float = 0.0
    """The greatest error of that figure."""
    listen_problem: str = ""
    """Why it cannot listen on its address; "": it can."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Nodes to which it cannot connect -> why."""
    storage_problem: str = ""


@dataclass(frozen=True)
class NodeFinding:
    """The result of one check of a node. `what`: its subject; `seen`: the observation."""

    node: str
    host: str
    what: str
    grade: Grade
    seen: str
    advice: str = ""


def findings(nodes: Sequence[InspectedNode], server: NodeFacts) -> list[NodeFinding]:
    """All faults, node by node, and one good finding for each node without a bad one."""
    usual = _most_frequent([dict(n.facts.packages).get("torch", "") for n in nodes if n.facts])
    uses_tls = [node.facts.tls for node in nodes if node.facts]
    most_use_tls = any(uses_tls) and 2 * sum(uses_tls) >= len(uses_tls)
    hosts = {node.node: node.host for node in nodes}
    found: list[NodeFinding] = []
    for node in sorted(nodes, key=lambda node: (node.host, node.node)):
        own = [
            NodeFinding(node.node, node.host, *fault)
            for fault in _faults(node, server, usual, most_use_tls, hosts)
        ]
        if node.facts is not None and not any(each.grade is Grade.BAD for each in own):
            own.insert(
                0, NodeFinding(node.node, node.host, "node", Grade.GOOD, _summary(node.facts))
            )
        found += own
    return found


_Fault = tuple[str, Grade, str, str]


def _faults(
    node: InspectedNode,
    server: NodeFacts,
    usual_torch: str,
    most_use_tls: bool,
    hosts: Mapping[str, str],
) -> Iterator[_Fault]:
    if node.software is not None:
        yield node.software.what, Grade.BAD, node.software.seen, node.software.advice
        return
    if node.facts is None:
        advice = "look at its raylet and at Ray's logs on that machine"
        yield "node", Grade.BAD, node.problem, advice
        return
    yield from _versions(node.facts, server, usual_torch)
    yield from _clock(node)
    yield from _memory(node.facts)
    yield from _limits(node.facts, bool(node.ray_gpus))
    yield from _network(node, hosts)
    yield from _tls(node.facts, most_use_tls)
    yield from _devices(node)
    if node.storage_problem:
        advice = "open the network to the storage, or correct the server's storage settings"
        yield "storage", Grade.BAD, node.storage_problem, advice


def _versions(facts: NodeFacts, server: NodeFacts, usual_torch: str) -> Iterator[_Fault]:
    here, there = dict(server.packages), dict(facts.packages)
    if _minor(facts.python) != _minor(server.python):
        seen = f"Python {facts.python}, the server has {server.python}"
        yield "python", Grade.BAD, seen, "install the server's version of Python there"
    if there.get("ray") != here.get("ray"):
        seen = f"Ray {there.get('ray', 'is missing')}, the server has {here.get('ray')}"
        yield "ray", Grade.BAD, seen, "install the server's version of Ray there"
    torch = there.get("torch", "")
    if not torch:
        advice = "pip install 'holdfast-train[server]' there"
        yield "torch", Grade.BAD, "torch is not installed", advice
    elif torch != usual_torch:
        advice = "install one version everywhere: the ranks of a job must compute the same bits"
        yield "torch", Grade.BAD, f"torch {torch}, most nodes have {usual_torch}", advice
    if facts.build != server.build:
        seen = (
            f"Holdfast {there.get('holdfast-train', '?')} (build {facts.build}), the server has "
            f"{here.get('holdfast-train', '?')} (build {server.build})"
        )
        advice = "install the server's version there; no job mixes builds"
        yield "holdfast", Grade.BAD, seen, advice


def _clock(node: InspectedNode) -> Iterator[_Fault]:
    ahead = node.clock_ahead_s
    least = max(0.0, abs(ahead) - node.clock_error_s)
    if least < CLOCK_ODD_S:
        return
    grade = Grade.BAD if least >= CLOCK_BAD_S else Grade.ODD
    side = "ahead of" if ahead > 0 else "behind"
    yield (
        "clock",
        grade,
        f"its clock is {abs(ahead):.1f} s {side} the server's",
        "synchronize the clocks (chrony, systemd-timesyncd)",
    )


def _memory(facts: NodeFacts) -> Iterator[_Fault]:
    if facts.memory_problem:
        advice = "memory checkpoints are stored there: remove it, or give it to Ray's user"
        yield "shm", Grade.BAD, facts.memory_problem, advice
    total, free = facts.shared_total, facts.shared_free
    larger = "mount /dev/shm with size=50%; in a container: --shm-size, or an emptyDir of Memory"
    if total is not None and total < SHARED_LEAST:
        yield "shm", Grade.BAD, f"/dev/shm has only {size_of(total)}", larger
    elif free is not None and free < SHARED_LOW:
        yield "shm", Grade.ODD, f"{size_of(free)} free in /dev/shm", larger
    if facts.cache_problem:
        advice = "set HOLDFAST_CACHE_DIR of the node to a folder that Ray's user may write"
        yield "cache", Grade.BAD, facts.cache_problem, advice
    elif facts.cache_free is not None and facts.cache_free < CACHE_LOW:
        grade = Grade.BAD if facts.cache_free < CACHE_LEAST else Grade.ODD
        seen = f"{size_of(facts.cache_free)} free for caches of data and code"
        yield "cache", grade, seen, "free space, or set HOLDFAST_CACHE_DIR to another disk"


def _limits(facts: NodeFacts, has_gpus: bool) -> Iterator[_Fault]:
    if facts.tasks_limit is not None:
        room = max(0, facts.tasks_limit - facts.tasks)
        if room < TASKS_LOW:
            grade = Grade.BAD if room < TASKS_LEAST else Grade.ODD
            seen = f"room for {room} more processes and threads ({facts.tasks_limit} at most)"
            advice = "raise TasksMax of the service, pids.max of the container or ulimit -u"
            yield "tasks", grade, seen, advice
    if facts.open_files is not None and facts.open_files < FILES_LOW:
        grade = Grade.BAD if facts.open_files < FILES_LEAST else Grade.ODD
        advice = f"raise LimitNOFILE of the service, or ulimit -n {FILES_LOW}"
        yield "files", grade, f"{facts.open_files} open files at most", advice
    if has_gpus and facts.locked_bytes is not None:
        seen = f"{size_of(facts.locked_bytes)} of memory may be locked"
        advice = "LimitMEMLOCK=infinity (ulimit -l unlimited): InfiniBand needs locked memory"
        yield "memlock", Grade.ODD, seen, advice


def _network(node: InspectedNode, hosts: Mapping[str, str]) -> Iterator[_Fault]:
    if node.listen_problem:
        seen = f"it cannot listen on its address {node.host}: {node.listen_problem}"
        advice = "start Ray there with the address of an interface, or free ports of its range"
        yield "network", Grade.BAD, seen, advice
    for other, why in sorted(node.unreachable.items()):
        yield (
            "network",
            Grade.BAD,
            f"cannot connect to {hosts.get(other, other)}: {why}",
            "open all ports between the nodes, or those of docs/deploy.md",
        )


def _tls(facts: NodeFacts, most_use_tls: bool) -> Iterator[_Fault]:
    if facts.tls_problem:
        yield "tls", Grade.BAD, facts.tls_problem, "see the section TLS of docs/deploy.md"
    elif facts.tls != most_use_tls:
        most = "it is on most nodes" if most_use_tls else "not on most nodes"
        seen = f"HOLDFAST_TLS_DIR is {'' if facts.tls else 'not '}set, but {most}"
        advice = "set it on all nodes (--tls-dir) or on none: others refuse this one"
        yield "tls", Grade.BAD, seen, advice
    elif facts.tls_days is not None and facts.tls_days < CERTIFICATE_LOW_DAYS:
        seen = f"its certificate for other nodes expires in {facts.tls_days:.0f} days"
        yield "tls", Grade.ODD, seen, "renew it (`holdfast cluster certificate`)"


def _devices(node: InspectedNode) -> Iterator[_Fault]:
    assert node.facts is not None
    facts = node.facts
    if facts.gpu_problem:
        yield "gpu", Grade.BAD, facts.gpu_problem, "check nvidia-smi and the driver there"
    elif node.ray_gpus > len(facts.gpus):
        seen = f"Ray offers {node.ray_gpus:g} GPUs, the driver shows {len(facts.gpus)}"
        yield "gpu", Grade.BAD, seen, "check nvidia-smi there, and start Ray there again"
    elif node.ray_gpus < len(facts.gpus):
        seen = f"Ray offers {node.ray_gpus:g} of the {len(facts.gpus)} GPUs"
        yield "gpu", Grade.ODD, seen, "start Ray there with --num-gpus, if they are for training"


def _summary(facts: NodeFacts) -> str:
    gpus = Counter(facts.gpus)
    parts = [
        f"{facts.hostname}: {facts.cpus} cores",
        *(f"{count} x {name}" for name, count in gpus.items()),
        *([f"{size_of(facts.memory_available)} memory free"] if facts.memory_available else []),
        *([f"{size_of(facts.shared_free)} free in /dev/shm"] if facts.shared_free else []),
    ]
    return ", ".join(parts)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _most_frequent(versions: Sequence[str]) -> str:
    """The first in order among the most frequent ones; "" if there is none."""
    counted = Counter(version for version in versions if version)
    return min(counted, key=lambda version: (-counted[version], version), default="")
