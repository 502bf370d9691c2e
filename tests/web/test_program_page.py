"""The page of a user's program: its level, its steps without an end, its sparse charts, its output,
its processes, and its failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.service.fake_cluster import FakeSupervisor, line, row, three_nodes
from tests.support.service.live_server import SPEC, LiveServer

from holdfast import Client
from holdfast_service.job_model.supervisor_protocol import EventKind

PROGRAM = {"command": "trainer --fast", "parallel": {"dp_shard": 4}}


def prepare_server(server: LiveServer) -> None:
    server.cluster.nodes = three_nodes(roomy=True)  # every job has enough nodes


@pytest.fixture(scope="module")
def program(dashboard_server: LiveServer) -> str:
    """A job whose program has attached and reported every tenth step, some without a loss."""
    supervisor = _attached(dashboard_server, "own-program", level=1, integration="lightning")
    for step in range(10, 420, 10):
        loss = math.nan if step % 20 else 5.0 / step
        found = replace(row(1, step, loss=loss), grad_norm=math.nan, lr=math.nan)
        supervisor.rows.append(replace(found, tokens=0, loader_wait_s=0.0))
    supervisor.step = 410
    return supervisor.launch.job_id


def _attached(server: LiveServer, name: str, level: int, integration: str | None) -> FakeSupervisor:
    """The supervisor of a new job, whose program has started."""
    with Client(server.address) as client:
        kept = {name: SPEC[name] for name in ("resources",) if name in SPEC}
        job = client.submit({"name": name, **kept, **PROGRAM})
    supervisor = server.supervisor(job.id)
    supervisor.train(0)
    supervisor.emit(EventKind.PROGRAM_ATTACHED, attempt=1, level=level, integration=integration)
    return supervisor


@pytest.mark.story("program page")
def test_the_page_of_a_program_shows_its_level_and_no_end_of_its_steps(
    open_page: Callable[..., Any], dashboard_server: LiveServer, program: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs/{program}")
    level = page.locator(".level")
    expect(level).to_contain_text("Level 1, reports its steps, through lightning")
    expect(level).to_contain_text("trainer --fast")
    level.locator("summary").click()
    expect(level.locator("pre")).to_contain_text("holdfast.torch.tier()")
    numbers = page.locator(".verdict-numbers")
    expect(numbers).to_contain_text("410")
    expect(numbers.get_by_role("progressbar")).to_have_count(0)
    charts = page.locator("#charts")
    expect(charts).to_contain_text("Loss")
    expect(charts).to_contain_text("Time between reports")
    for absent in ("Tokens per second", "Gradient norm", "Learning rate", "Waiting for"):
        expect(charts).not_to_contain_text(absent)
    page.get_by_role("link", name="Spec").click()
    lines = page.locator(".spec-lines")
    expect(lines).to_contain_text("command:")
    for absent in ("recipe:", "global_batch:", "tp:"):
        expect(lines).not_to_contain_text(absent)


def test_the_list_shows_the_step_of_a_program(
    open_page: Callable[..., Any], dashboard_server: LiveServer, program: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs")
    line = page.locator(".progress").first
    expect(line).to_contain_text("step 410")
    expect(line.get_by_role("progressbar")).to_have_count(0)


def test_a_program_that_reports_nothing_shows_its_output_and_its_processes(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    supervisor = _attached(dashboard_server, "silent-program", level=0, integration=None)
    supervisor.logs.extend(line(seq, f"epoch {seq} done") for seq in range(1, 31))
    page = open_page(f"{dashboard_server.address}/jobs/{supervisor.launch.job_id}")
    output = page.get_by_role("region", name="The last lines of the output")
    expect(output.locator(".log-line")).to_have_count(10)
    expect(output.locator(".log-line").last).to_contain_text("epoch 30 done")
    supervisor.logs.append(line(31, "epoch 31 done"))
    expect(output.locator(".log-line").last).to_contain_text("epoch 31 done")
    expect(page.locator("#charts, .heat")).to_have_count(0)  # nothing that would be empty
    page.get_by_role("link", name="Processes", exact=True).click()
    processes = page.get_by_role("region", name="Processes of this job").locator("tbody tr")
    expect(processes).to_have_count(4)
    expect(processes.nth(1)).to_contain_text("pid 101")
    expect(page.locator(".heat, #ranks")).to_have_count(0)
    processes.nth(1).get_by_role("button", name="rank 1").click()
    expect(page.get_by_role("dialog").get_by_role("heading", name="Rank 1")).to_be_visible()


def test_a_failed_job_shows_its_message_once_with_the_traceback(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    supervisor = _attached(dashboard_server, "broken-program", level=0, integration=None)
    message = "Rank 1 failed: KeyError: 'lr'"
    traceback = "Traceback (most recent call last):\n  line 7, in main\nKeyError: 'lr'"
    supervisor.end("FAILED", "user_error", message=message, traceback=traceback)
    page = open_page(f"{dashboard_server.address}/jobs/{supervisor.launch.job_id}")
    expect(page.locator(".traceback")).to_be_visible()
    expect(page.locator(".traceback")).to_contain_text("line 7, in main")
    expect(page.get_by_text("Rank 1 failed")).to_have_count(1)
