"""The cluster page: nodes with their jobs and findings, the queue, cordon and uncordon."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.service.databases import run_in_thread
from tests.support.service.live_server import LiveServer
from tests.support.web.fleet import HEAD, add_fleet
from tests.web.conftest import PHONE, assert_no_violations


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
    page.wait_for_function("() => document.querySelectorAll('[data-node]').length === 3")
    jobs = page.locator(".node-jobs").all_inner_texts()
    assert sorted(text.split() for text in jobs) == [
        ["occupant"],
        ["occupant"],
        ["standby", "of", "occupant"],
    ]
    assert page.locator(f".node-jobs a[href='/jobs/{running_job}']").count() == 3


def test_the_counts_of_nodes_add_up(cluster: Callable[..., Any]) -> None:
    page = cluster()
    page.locator(f"[data-node='{HEAD}']").wait_for()
    there, gone = _numbers(page.locator("h1 + span").inner_text())
    chips = {
        chip.inner_text().rstrip("0123456789").strip(): _numbers(chip.inner_text())[0]
        for chip in page.locator(".filter-chip").all()
    }
    assert chips["Gone"] == gone == 1 and chips["Runs no ranks"] == 1
    assert sum(chips.values()) == there + gone == page.locator("[data-node]").count()
    assert page.locator(".node-tile").count() == there + gone
    tile = page.locator(".tile", has_text="Nodes in use")
    in_use, usable, standby, excluded = _numbers(tile.inner_text())
    assert usable == chips["Ready"] + chips["Unhealthy"]
    assert excluded == chips["Cordoned"] + chips["Quarantined"]
    assert usable + excluded + chips["Runs no ranks"] == there
    assert "the head runs no ranks" in tile.inner_text()
    busy = ":is(.is-running, .is-recovering)"
    assert in_use == page.locator(f".node-tile{busy}:not([data-busy='false'])").count()
    assert standby == page.locator(f".node-tile{busy}[data-busy='standby']").count() == 2


def test_nodes_with_long_ids_on_one_host_have_short_and_distinct_names(
    cluster: Callable[..., Any],
) -> None:
    page = cluster()
    head = page.locator(f"[data-node='{HEAD}']")
    names = page.locator(".node-name .strong").all_inner_texts()
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 30
    assert head.locator(".node-name").inner_text().split() == ["127.0.0.1", "·", HEAD[:9], "head"]
    head.locator(".node-name").click()
    assert HEAD in head.locator(".node-details").inner_text()
    assert_no_violations(page)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_node_shows_its_findings(cluster: Callable[..., Any]) -> None:
    page = cluster("?standing=unwell")
    page.locator("[data-node] .node-name").first.click()
    details = page.locator(".node-details").first
    details.wait_for()
    assert "XID" in details.inner_text()


def test_the_queue_shows_the_awaited_resource(cluster: Callable[..., Any]) -> None:
    page = cluster()
    queue = page.get_by_role("region", name="Queue")
    assert queue.get_by_role("listitem").count() >= 1
    assert "needs" in queue.inner_text()


@pytest.mark.parametrize(
    "options",
    [{"viewport": PHONE, "is_mobile": True, "has_touch": True}, {"color_scheme": "dark"}],
    ids=["phone", "dark"],
)
def test_the_page_fits_a_phone_and_the_dark_theme(
    cluster: Callable[..., Any], options: dict[str, Any]
) -> None:
    page = cluster(**options)
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
