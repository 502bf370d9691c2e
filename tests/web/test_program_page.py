"""The page of a user's program: its level, its steps without an end, its sparse charts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.service.fake_cluster import row
from tests.support.service.live_server import SPEC, LiveServer

from holdfast import Client
from holdfast_service.job_model.supervisor_protocol import EventKind

PROGRAM = {"command": "trainer --fast", "parallel": {"dp_shard": 4}}


@pytest.fixture(scope="module")
def program(dashboard_server: LiveServer) -> str:
    """A job whose program has attached and reported every tenth step, some without a loss."""
    with Client(dashboard_server.address) as client:
        kept = {name: SPEC[name] for name in ("resources",) if name in SPEC}
        job = client.submit({"name": "own-program", **kept, **PROGRAM})
    supervisor = dashboard_server.supervisor(job.id)
    supervisor.train(0)
    supervisor.emit(EventKind.PROGRAM_ATTACHED, attempt=1, level=1, integration="lightning")
    for step in range(10, 420, 10):
        loss = math.nan if step % 20 else 5.0 / step
        found = replace(row(1, step, loss=loss), grad_norm=math.nan, lr=math.nan)
        supervisor.rows.append(replace(found, tokens=0, loader_wait_s=0.0))
    supervisor.step = 410
    return job.id


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
    charts.scroll_into_view_if_needed()
    expect(charts).to_contain_text("Loss")
    expect(charts).to_contain_text("Time between reports")
    for absent in ("Tokens per second", "Gradient norm", "Learning rate", "Waiting for"):
        expect(charts).not_to_contain_text(absent)
    page.locator("#spec").scroll_into_view_if_needed()
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
