"""A job on nodes with IPv6 addresses: every channel between its processes works, also after a
fault."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind

pytestmark = pytest.mark.chaos
HOST = "::1"


def has_ipv6() -> bool:
    try:
        socket.create_server((HOST, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_job_recovers_on_nodes_with_ipv6_addresses(tmp_path: Path) -> None:
    plan = [{"point": "forward", "rank": 1, "step": 6, "action": "kill"}]
    with supervised(tmp_path, small_training(12), standbys=0, host=HOST, chaos=plan) as run:
        end = run.wait_end()
        assert end["outcome"] == "SUCCEEDED", run.story()
        assert {member["host"] for member in run.of(EventKind.ATTEMPT_FORMING)[-1]["members"]} == {
            HOST
        }
