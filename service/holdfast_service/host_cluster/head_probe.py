"""Asks a head for the versions and the nodes of its cluster.

The question is asked by a child process: Ray reads its settings once on import, and its client may
block without limit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast_service.embedded_cluster.ray_settings import token_variables
from holdfast_service.host_cluster.endpoint import Endpoint
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_workers.ipc import environment

BUILD_LABEL = "holdfast.io/build"
"""The label of a node that names the build of Holdfast that started it."""
TLS_LABEL = "holdfast.io/tls"
"""The label of a node that says whether it uses TLS between nodes: `on` or `off`."""
WRONG_TOKEN = "AuthenticationError"
ANSWER_S = 15.0
_CALL_S = 5.0


@dataclass(frozen=True)
class ClusterNode:
    name: str
    address: str
    alive: bool
    head: bool
    cpus: float
    gpus: float
    labels: dict[str, str]
    build: str = ""
    """The build of Holdfast that started it; "": of a version that did not say so, or of none."""
    tls: str = ""
    """Whether it uses TLS between nodes: `on` or `off`; "": not known."""


@dataclass(frozen=True)
class HeadAnswer:
    ray: str
    python: str
    nodes: tuple[ClusterNode, ...]


def ask_head(head: Endpoint, token: Path, timeout_s: float = ANSWER_S) -> HeadAnswer:
    """Raises HostClusterError if no head answers there, or it refuses the token."""
    _connect(head, min(timeout_s, _CALL_S))
    command = [sys.executable, "-m", "holdfast_service.host_cluster.head_probe", str(head)]
    variables = {
        **environment.for_nodes(os.environ),
        **token_variables(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        child = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostClusterError(
            f"the head at {head} accepts connections but gave no answer within {timeout_s:.0f} s: "
            "see `holdfast cluster status` there; if Ray's own TLS is on there, set RAY_USE_TLS "
            "and RAY_TLS_* here as there"
        ) from None
    if WRONG_TOKEN in child.stderr:
        raise HostClusterError(
            f"the head at {head} refuses this token: copy the token file from the head again"
        )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise HostClusterError(
            f"{head} does not answer as the head of a Ray cluster ({last}): check address and port"
        )
    return _answer_of(json.loads(child.stdout.splitlines()[-1]))


def _connect(head: Endpoint, timeout_s: float) -> None:
    try:
        socket.create_connection((head.host, head.port), timeout_s).close()
    except OSError as error:
        raise HostClusterError(
            f"no head answers at {head} ({error}): run `holdfast cluster up --head` there, and let "
            f"this machine connect to its port {head.port}"
        ) from error


def _answer_of(fields: dict[str, Any]) -> HeadAnswer:
    nodes = tuple(ClusterNode(**node) for node in fields["nodes"])
    return HeadAnswer(fields["ray"], fields["python"], nodes)


def _ask(address: str) -> HeadAnswer:
    from ray._common.usage.usage_lib import get_cluster_metadata  # late: as the module says
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)
    versions = get_cluster_metadata(client)
    nodes = client.get_all_node_info(timeout=_CALL_S)
    return HeadAnswer(
        versions["ray_version"],
        versions["python_version"],
        tuple(
            ClusterNode(
                name=node.node_name,
                address=node.node_manager_address,
                alive=node.state == 0,
                head=node.is_head_node,
                cpus=node.resources_total.get("CPU", 0.0),
                gpus=node.resources_total.get("GPU", 0.0),
                labels={k: v for k, v in node.labels.items() if not _is_own(k)},
                build=node.labels.get(BUILD_LABEL, ""),
                tls=node.labels.get(TLS_LABEL, ""),
            )
            for node in nodes.values()
        ),
    )


def _is_own(label: str) -> bool:
    return label.startswith("ray.io/") or label in (BUILD_LABEL, TLS_LABEL)


if __name__ == "__main__":
    print(json.dumps(asdict(_ask(sys.argv[1]))))
