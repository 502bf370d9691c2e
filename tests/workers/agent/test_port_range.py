"""An agent and its processes listen within the node's range of ports only."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.support.nodes.port_ranges import free_range, listening_ports
from tests.support.nodes.supervised import small_agents
from tests.support.waiting import eventually

WAIT_S = 60.0


@pytest.mark.slow
def test_two_agents_of_a_machine_share_a_range_that_just_suffices(tmp_path: Path) -> None:
    ports = free_range(4)
    with small_agents(tmp_path, 2, ports=str(ports)) as agents:
        agents.ensure()
        eventually(lambda: all(agents.report(seat).ready for seat in agents.seats), WAIT_S)
        reports = [agents.report(seat) for seat in agents.seats]
        found = [listening_ports(report.pid) for report in reports]
        assert found == [sorted((report.data_port, report.store_port)) for report in reports]
        assert sorted(port for each in found for port in each) == [*ports.from_offset(0)]


@pytest.mark.slow
def test_an_agent_whose_store_finds_no_port_says_so_until_it_finds_one(tmp_path: Path) -> None:
    ports = free_range(2)
    with (
        socket.create_server(("127.0.0.1", ports.last)) as taken,
        small_agents(tmp_path, ports=str(ports)) as agents,
    ):
        agents.ensure()
        eventually(lambda: agents.report("n0").failure is not None, WAIT_S)
        report = agents.report("n0")
        assert report.failure is not None and not report.ready
        assert f"HOLDFAST_PORT_RANGE={ports} are in use" in report.failure.message
        assert "set a wider range" in report.failure.message
        taken.close()
        eventually(lambda: agents.report("n0").ready, WAIT_S)
        report = agents.report("n0")
        assert report.failure is None and report.store_port == ports.last
