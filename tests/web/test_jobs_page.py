"""The list of jobs in a browser: search, filters, keyboard navigation and live updates."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.support.service.databases import run_in_thread
from tests.support.service.fake_cluster import three_nodes
from tests.support.service.live_server import LiveServer
from tests.support.web.crowd import add_crowd
from tests.web.conftest import PHONE, assert_no_violations, submitted

from holdfast_service.job_model.supervisor_protocol import Phase

CROWD = 3000


def prepare_server(server: LiveServer) -> None:
    server.cluster.nodes = three_nodes(roomy=True)  # every job has enough nodes
    run_in_thread(add_crowd(server.settings, CROWD))


@pytest.fixture
def jobs(open_page: Callable[..., Any], dashboard_server: LiveServer) -> Callable[..., Any]:
    def opened(query: str = "", **options: Any) -> Any:
        page = open_page(f"{dashboard_server.address}/jobs{query}", **options)
        page.wait_for_selector("[data-job], .empty")
        return page

    return opened


def filters(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.evaluate("location.href")).query)


def shown(page: Any, before: int = 0) -> int:
    """The number of jobs in the heading, once it differs from `before`."""
    found = page.wait_for_function(
        """before => {
            const text = document.querySelector('h1 + span').textContent;
            const found = Number(text.replace(/\\D/g, ''));
            return /job/.test(text) && found !== before && { found };
        }""",
        arg=before,
    )
    return int(found.json_value()["found"])


@pytest.mark.slow
def test_the_root_leads_to_the_jobs(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(dashboard_server.address)
    page.wait_for_url("**/jobs")
    page.wait_for_selector("[data-job]")
    assert page.title() == "Jobs · Holdfast"


@pytest.mark.slow
def test_thousands_of_jobs_scroll_without_rendering_all_rows(jobs: Callable[..., Any]) -> None:
    page = jobs()
    assert shown(page) == CROWD
    assert page.locator("[data-job]").count() < 80
    rows = page.locator("[role=table]")
    assert rows.get_attribute("aria-rowcount") == str(CROWD + 1)
    rows.evaluate("box => { box.scrollTop = box.scrollHeight }")
    page.wait_for_selector(f"[aria-rowindex='{CROWD + 1}'][data-job]")
    assert page.locator("[data-job]").count() < 80


@pytest.mark.slow
def test_filters_are_restored_from_the_url(jobs: Callable[..., Any]) -> None:
    page = jobs()
    page.get_by_role("button", name="Failed").click()
    page.wait_for_url("**state=FAILED**")
    failed = shown(page, CROWD)
    assert 0 < failed < CROWD
    assert set(page.locator("[data-job] .cell-state").all_inner_texts()) == {"Failed"}
    page.get_by_role("searchbox").fill("llama")
    page.wait_for_url("**q=llama**")
    found = shown(page, failed)
    assert 0 < found < failed
    assert filters(page) == {"q": ["llama"], "state": ["FAILED"]}

    page.reload()
    page.wait_for_selector("[data-job]")
    assert shown(page) == found
    assert page.get_by_role("searchbox").input_value() == "llama"
    assert page.get_by_role("button", name="Failed").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile(r"/jobs$"))


@pytest.mark.slow
def test_an_empty_search_result_can_be_cleared(jobs: Callable[..., Any]) -> None:
    page = jobs("?q=no-such-job-at-all")
    page.get_by_role("heading", name="No job matches").wait_for()
    page.get_by_role("button", name="Show all jobs").click()
    page.wait_for_selector("[data-job]")
    assert filters(page) == {}


def test_the_list_is_navigated_by_keyboard(jobs: Callable[..., Any]) -> None:
    page = jobs()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("j")  # typed as text, not a shortcut
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile(r"/jobs$"))
    for key in "jjjk":
        page.keyboard.press(key)
    page.wait_for_selector(".chosen")
    chosen = page.locator(".chosen")
    assert chosen.get_attribute("aria-rowindex") == "3"  # the second job
    assert page.evaluate("document.activeElement.dataset.rowLink") == "1"
    job = chosen.get_attribute("data-job")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{job}")
    page.go_back()
    page.wait_for_selector("[data-job]")


def test_keyboard_navigation_scrolls_rows_into_view(jobs: Callable[..., Any]) -> None:
    page = jobs()
    for _ in range(40):
        page.keyboard.press("j")
    page.wait_for_selector(".chosen[aria-rowindex='41']")
    box, row = page.locator("[role=table]").bounding_box(), page.locator(".chosen").bounding_box()
    assert box["y"] < row["y"] < row["y"] + row["height"] <= box["y"] + box["height"] + 1


@pytest.mark.story("jobs page")
def test_a_job_is_updated_live(jobs: Callable[..., Any], dashboard_server: LiveServer) -> None:
    page = jobs()
    page.wait_for_selector("[data-live=live]")
    job = submitted(dashboard_server, name="watched")
    line = page.locator(f"[data-job='{job}']")
    line.wait_for()  # a new job appears first without a reload
    supervisor = dashboard_server.run_job(job, 3, end=False)
    line.locator(".cell-state", has_text="Running").wait_for()
    line.locator(".progress-text", has_text="3 / 5").wait_for()
    supervisor.enter(Phase.RECOVERING)
    line.locator(".cell-state", has_text="Recovering").wait_for()
    supervisor.enter(Phase.RUNNING)
    line.locator(".cell-state", has_text="Running").wait_for()
    supervisor.run(1, 4, 5)
    supervisor.end()
    line.locator(".cell-state", has_text="Succeeded").wait_for()


def test_the_list_fits_a_phone(jobs: Callable[..., Any]) -> None:
    page = jobs("?state=SUCCEEDED", viewport=PHONE, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    line = page.locator("[data-job]").first
    right = 0.0
    for cell in ("loss", "goodput", "faults"):  # side by side
        box = line.locator(f".cell-{cell}").bounding_box()
        text = line.locator(f".cell-{cell}").evaluate("cell => cell.scrollWidth")
        assert right <= box["x"] and text <= box["width"] + 1
        right = box["x"] + box["width"]
    assert right <= PHONE["width"]
    name = line.locator(".cell-name").bounding_box()
    state = line.locator(".state").bounding_box()
    assert name["width"] > 100 and name["x"] + name["width"] <= state["x"]
    assert state["x"] + state["width"] <= right + 1
    assert_no_violations(page)


def test_the_card_ends_after_its_last_line_and_tells_how_jobs_ended(
    jobs: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    for name in ("ended-one", "ended-two"):
        dashboard_server.run_job(submitted(dashboard_server, name=name))
    page = jobs("?q=ended-&state=SUCCEEDED")
    page.wait_for_function("() => document.querySelectorAll('[data-job]').length === 2")
    card, last = page.locator(".lines").bounding_box(), page.locator("[data-job]").last
    box = last.bounding_box()
    assert 0 <= card["y"] + card["height"] - (box["y"] + box["height"]) < 6
    text = last.locator(".cell-progress").inner_text()
    assert text.startswith("all 5 steps") and "took" in text and "ended" in text
    assert "no incidents" in last.locator(".cell-progress [title]").last.get_attribute("title")
    # Its start is most of its short time.
    assert last.locator(".cell-goodput .low").count() == 0
    assert_no_violations(page)


@pytest.mark.slow
def test_the_dark_theme_can_be_switched_and_is_kept(
    jobs: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = jobs("?state=RUNNING&state=RECOVERING&sort=goodput", color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(background) != dark
    page.reload()
    page.wait_for_selector("[data-job]")
    assert page.evaluate(background) != dark  # the choice is stored
    page.keyboard.press("t")
    assert page.evaluate(background) == dark
