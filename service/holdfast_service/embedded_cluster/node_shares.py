"""Divides the processors and GPUs of a machine among the nodes of its embedded cluster. Pure.

Every GPU belongs to exactly one node. With more nodes than GPUs the last nodes have none: jobs on
the CPU may use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NODES_WITHOUT_GPUS = 3
"""Nodes by default on a machine without GPUs: enough for two nodes of ranks and a standby."""
LEAST_CPUS = 2
"""A node offers so many CPUs even where fewer are left for it: nodes of a small machine share."""


@dataclass(frozen=True)
class NodeShare:
    """What one node offers. `gpus`: ids of devices, as the device variable names them."""

    cpus: int
    gpus: tuple[str, ...] = ()


def default_nodes(gpus: int) -> int:
    """The number of nodes where none is given: a single one with all GPUs, because ranks on one
    node exchange data fastest; without GPUs `NODES_WITHOUT_GPUS`."""
    return 1 if gpus else NODES_WITHOUT_GPUS


def divide(cpus: int, gpus: Sequence[str], nodes: int) -> tuple[NodeShare, ...]:
    """The shares of `nodes` nodes. Equal but for the remainders, which go to the first nodes.
    Raises ValueError if there are no nodes, or one GPU is named twice."""
    if nodes < 1:
        raise ValueError(f"{nodes} nodes: at least one is needed")
    if len(set(gpus)) != len(gpus):
        raise ValueError(f"a GPU is named twice in {', '.join(gpus)}")
    shares, first = [], 0
    for number in range(nodes):
        count = _share(len(gpus), nodes, number)
        shares.append(
            NodeShare(
                max(LEAST_CPUS, _share(cpus, nodes, number)), tuple(gpus[first : first + count])
            )
        )
        first += count
    return tuple(shares)


def share_of(shares: Sequence[NodeShare], number: int) -> NodeShare:
    """The share of the node with this number. One that is added later has the CPUs of the smallest
    node, and no GPU: all of them belong to the first nodes."""
    if number < len(shares):
        return shares[number]
    return NodeShare(min(share.cpus for share in shares))


def visible_gpus(present: Sequence[str], wanted: str | None) -> tuple[str, ...]:
    """The GPUs that a device variable allows, by their names there; all of `present` if it is
    unset.

    `present`: UUIDs, in the order of their indices. `wanted` names indices, UUIDs or their
    beginnings, or MIG devices. As in CUDA's own rule, the list ends before the first name that
    names no device (CUDA C++ Programming Guide, "CUDA Environment Variables"); so does it before a
    name of a device that is named already.
    """
    if wanted is None:
        return tuple(present)
    found: dict[str, str] = {}  # device → its name in the variable
    for name in (part.strip() for part in wanted.split(",")):
        device = _device(present, name)
        if not device or device in found:
            break
        found[device] = name
    return tuple(found.values())


def _device(present: Sequence[str], name: str) -> str:
    """The device that the name means; "" if none."""
    if name.isascii() and name.isdigit():
        return present[int(name)] if int(name) < len(present) else ""
    if name.startswith("MIG-"):
        return name
    named = [uuid for uuid in present if name and uuid.startswith(name)]
    return named[0] if len(named) == 1 else ""


def _share(whole: int, parts: int, number: int) -> int:
    return whole // parts + (number < whole % parts)
