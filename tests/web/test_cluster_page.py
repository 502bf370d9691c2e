"""The cluster page: nodes with their jobs and findings, the queue, cordon and uncordon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.service.databases import run_in_thread
from tests.support.service.live_server import LiveServer
from tests.support.web.fleet import add_fleet
from tests.web.conftest import PHONE, save_screenshot


def prepare_server(server: LiveServer) -> None:
    run_in_thread(add_fleet(server))


JOB_NAME = "occupant"


@pytest.fixture
def cluster(
    open_page: Callable[..., Any], dashboard_server: LiveServer, running_job: str
) -> Callable[..., Any]:
    def opened(query: str = "", **options: Any) -> Any:
        page = open_page(f"{dashboard_server.address}/cluster{query}", **options)
        page.wait_for_selector("[data-node]")
        if not query:
            page.locator(f".node-jobs a[href='/jobs/{running_job}']").first.wait_for()
        return page

    return opened


@pytest.mark.story("cluster page")
def test_a_node_is_cordoned_and_uncordoned(cluster: Callable[..., Any]) -> None:
    page = cluster()
    save_screenshot(page, "cluster")
    node_line = page.locator("[data-node=node2]")
    node_line.get_by_role("button", name="Cordon").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_role("button", name="Cordon").is_disabled()  # a reason is required
    dialog.get_by_label("Reason").fill("its fan is loud")
    dialog.get_by_label("Duration").select_option("3600")
    dialog.get_by_role("button", name="Cordon").click()
    node_line.get_by_text("Cordoned", exact=True).wait_for()
    node_line.get_by_text("its fan is loud").wait_for()
    assert "back in" in node_line.inner_text()
    node_line.get_by_role("button", name="Uncordon").click()
    node_line.get_by_text("Ready", exact=True).wait_for()


def test_nodes_are_found_by_their_jobs_and_the_filter_is_in_the_url(
    cluster: Callable[..., Any], running_job: str
) -> None:
    page = cluster()
    total = page.locator("[data-node]").count()
    page.locator(".filter-chip", has_text="Quarantined").click()
    page.wait_for_url("**standing=quarantined**")
    assert 0 < page.locator("[data-node]").count() < total
    page.locator(".filter-chip", has_text="Quarantined").click()
    page.keyboard.press("/")
    page.keyboard.type("occupant")
    page.wait_for_url("**q=occupant**")
    page.wait_for_function("() => document.querySelectorAll('[data-node]').length === 2")
    assert page.locator(f".node-jobs a[href='/jobs/{running_job}']").count() == 2


def test_a_node_shows_its_findings(cluster: Callable[..., Any]) -> None:
    page = cluster("?standing=unwell")
    page.locator("[data-node] .node-name").first.click()
    details = page.locator(".node-details").first
    details.wait_for()
    assert "XID" in details.inner_text()
    save_screenshot(page, "cluster-node")


def test_the_queue_shows_the_awaited_resource(cluster: Callable[..., Any]) -> None:
    page = cluster()
    queue = page.get_by_role("region", name="Queue")
    assert queue.get_by_role("listitem").count() >= 1
    assert "needs" in queue.inner_text()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cluster-phone", {"viewport": PHONE, "is_mobile": True, "has_touch": True}),
        ("cluster-dark", {"color_scheme": "dark"}),
    ],
)
def test_the_page_fits_a_phone_and_the_dark_theme(
    cluster: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    page = cluster(**options)
    save_screenshot(page, name)
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
