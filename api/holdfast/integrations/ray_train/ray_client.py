"""A rank as a client of the Ray cluster of its node. Only the ranks of jobs with Ray datasets are;
the node's agent gives them the address, and the path of the token's file."""

from __future__ import annotations

import logging
import signal
import socket
import time

import ray

from holdfast.integrations.ray_train.errors import ClusterUnusable
from holdfast.integrations.ray_train.rank_place import ClusterPlace

ANSWER_S = 10.0
"""Deadline of the first answer of the cluster's control service."""
LOOK_S = 0.2
"""Pause between two looks for free CPUs."""


def connect(cluster: ClusterPlace, job_id: str, *, ships_code: bool) -> None:
    """Make this process a client. `ships_code`: tasks that it starts find the job's code. Raises
    ClusterUnusable."""
    handler = signal.getsignal(signal.SIGTERM)
    code = {"working_dir": cluster.code} if ships_code and cluster.code else {}
    host, _, port = cluster.address.rpartition(":")
    try:
        # Ray's client would wait much longer for a port that is closed.
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        ray.init(
            address=cluster.address,
            namespace=f"holdfast-ranks-{job_id}",
            runtime_env=code or None,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address=cluster.host,
        )
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise ClusterUnusable(
            f"this rank cannot use the Ray cluster at {cluster.address}, which Ray datasets need: "
            f"{error}. If the cluster has a token, the nodes need it as a file "
            "(RAY_AUTH_TOKEN_PATH)"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own


def wait_for_free_cpu(timeout_s: float) -> None:
    """Wait for a CPU that no job has reserved. Raises ClusterUnusable."""
    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU", 0.0) < 1:
        if time.monotonic() > deadline:
            raise ClusterUnusable(
                f"Ray Data needs a CPU to read the datasets, and for {timeout_s:g} s jobs had "
                "reserved all of the cluster: give the job fewer cpus_per_worker, or the cluster "
                "more CPUs"
            )
        time.sleep(LOOK_S)
