"""The page of a job of a thousand ranks: its tabs, live updates, the brush, incidents, keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.web import seed
from tests.support.web.scene import DRAWN, Scene, open_drawn_page, open_scene
from tests.web.conftest import PHONE, assert_no_violations

TABS = ("", "charts", "ranks", "incidents", "logs", "checkpoints", "events", "spec")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    size = seed.Size(steps=20_000, events=1_500, log_lines=6_000)
    with open_scene(tmp_path_factory.mktemp("big"), size) as found:
        yield found


@pytest.fixture
def job_page(scene: Scene, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """`job_page(tab and query, **options)`."""
    return lambda tab="", **options: open_drawn_page(open_page, f"{scene.address}{tab}", **options)


def tab(page: Any, name: str) -> None:
    """Open that tab of the page."""
    page.get_by_role("navigation", name="Views of this job").get_by_role("link", name=name).click()


@pytest.mark.slow
def test_the_brush_filters_the_tabs_and_is_in_the_url(
    scene: Scene, job_page: Callable[..., Any]
) -> None:
    page = job_page("/incidents")
    api = scene.address.replace("/jobs/", "/api/v1/jobs/")
    line = page.request.get(f"{api}/timeline").json()
    since, until, hung_at = map(
        datetime.fromisoformat, (line["since"], line["until"], line["incidents"][1]["at"])
    )
    share = (hung_at - since) / (until - since)
    cards = page.locator("#incidents .incident")
    expect(cards).to_have_count(len(seed.STORY))
    box = page.locator(".ribbon-plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] * (share - 0.04), box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (share + 0.04), box["y"] + 40, steps=4)
    page.mouse.up()
    page.locator(".brush-chip").wait_for()
    expect(page).to_have_url(re.compile(r"from=.*to="))
    expect(cards).to_have_count(1)
    assert "A rank stopped making progress" in page.locator("#incidents").inner_text()
    page.reload()
    page.wait_for_function(DRAWN)
    expect(cards).to_have_count(1)
    tab(page, "Log")
    page.locator(".log-line").first.wait_for()
    since, until = page.locator(".brush-chip span").first.inner_text().split(" – ")
    first = page.locator(".log-line time").first.inner_text()
    assert since <= first <= until.split()[0] + "z", (since, first, until)
    start = page.get_by_role("slider", name="Show from")
    before = page.evaluate("location.href")
    start.focus()
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_function("before => location.href !== before", arg=before)
    page.keyboard.press("Escape")
    page.locator(".brush-chip").wait_for(state="detached")
    tab(page, "Incidents")
    expect(cards).to_have_count(len(seed.STORY))


def test_an_incident_shows_its_evidence_its_decision_and_the_refused_alternatives(
    job_page: Callable[..., Any],
) -> None:
    page = job_page()
    page.get_by_role("button", name="Incident 2: hang").click()
    card = page.locator("#incident-2")
    card.locator(".incident-body").wait_for()
    expect(page).to_have_url(re.compile("incident=2"))
    text = card.inner_text()
    for part in ("9.80 s against 4.20 s", "rank 613", "0.93", "replace the worker", "1 of 20"):
        assert part in text
    assert not card.get_by_text("a standby is ready now").is_visible(), "folded at first"
    card.get_by_text("6 alternatives refused").click()
    assert card.get_by_text("a standby is ready now").is_visible()
    assert card.get_by_text("fetch_shard").first.is_visible()
    assert card.locator(".phases li").count() == len(seed.STORY[1].phases_s) + 1


def test_a_loss_reads_as_a_sentence_and_a_node_id_is_short(job_page: Callable[..., Any]) -> None:
    page = job_page()
    page.get_by_role("button", name="Incident 1: node lost").click()
    card = page.locator("#incident-1")
    card.get_by_text("Ranks 328 to 335 on agent n41 were lost.").wait_for()
    text = card.inner_text()
    assert "on_notice" not in text and "on notice" not in text
    assert "The decision was to replace the node, because" in text
    assert seed.LOST_NODE_ID not in text
    assert card.get_by_title(seed.LOST_NODE_ID).first.inner_text() == seed.LOST_NODE_ID[:8]


def test_a_rank_opens_by_keyboard_and_returns_the_focus(job_page: Callable[..., Any]) -> None:
    page = job_page("/ranks")
    heat = page.get_by_role("listbox")
    heat.focus()
    page.keyboard.press("ArrowDown")
    slowest = page.locator(".heat-cell b").inner_text()
    assert slowest == f"rank {seed.STORY[-1].ranks[0]}", "the rank that is slow now comes first"
    page.keyboard.press("Enter")
    drawer = page.get_by_role("dialog")
    drawer.get_by_role("heading", name=slowest.capitalize(), exact=True).wait_for()
    workers = drawer.get_by_role("region", name="Workers of this rank").locator("tbody tr")
    workers.first.wait_for()
    assert workers.count() == len(seed.STORY) + 1
    assert "new" in workers.first.inner_text(), "another process than in the previous attempt"
    drawer.locator(".log-line").first.wait_for()
    page.keyboard.press("Escape")
    drawer.wait_for(state="detached")
    expect(page).not_to_have_url(re.compile("rank="))
    assert heat.evaluate("element => element === document.activeElement")


@pytest.mark.slow
def test_the_log_is_searched_by_expression_and_level(
    job_page: Callable[..., Any], open_page: Any
) -> None:
    page = job_page("/logs")
    search = page.get_by_role("searchbox", name="Search the log")
    search.fill(r"shard \d+ took 3\.\d+")
    page.wait_for_url("**grep=**")
    page.wait_for_function(
        """() => {
          const lines = [...document.querySelectorAll('.log-line')];
          return lines.length && lines.every((line) => line.querySelector('mark'));
        }"""
    )
    assert "WARNING reading shard" in page.locator(".log-line").first.inner_text()
    search.fill("(unclosed")
    page.locator("#logs [role=alert]").wait_for()
    open_page.errors[:] = [
        error for error in open_page.errors if "422" not in error
    ]  # the server refuses the pattern
    search.fill("")
    page.get_by_role("combobox", name="Level").select_option("error")
    page.wait_for_url("**level=error**")
    page.get_by_text("TimeoutError: The read operation timed out").first.wait_for()
    assert (
        page.get_by_role("link", name="Download this view")
        .get_attribute("href")
        .endswith("level=error")
    )


def test_two_specs_are_compared(scene: Scene, job_page: Callable[..., Any]) -> None:
    page = job_page("/spec")
    page.get_by_role("searchbox", name="Compare with another job").fill("probe")
    page.get_by_role("button", name="atlas-probe").click()
    row = page.locator(".difference tr", has_text="parallel.dp_shard")
    row.wait_for()
    assert [item.inner_text() for item in row.locator("td").all()] == ["128", "2"]
    expect(page).to_have_url(re.compile(f"against={scene.small.job_id}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schemes", "options"),
    [
        (["light", "dark"], {}),
        (["dark"], {"viewport": PHONE, "has_touch": True}),
    ],
    ids=["wide", "phone"],
)
def test_axe_finds_no_violations(
    scene: Scene, job_page: Callable[..., Any], schemes: list[Any], options: Any
) -> None:
    page = job_page(**options)
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        _check_all_tabs(scene, page)


def _check_all_tabs(scene: Scene, page: Any) -> None:
    for part in TABS:
        page.goto(f"{scene.address}/{part}{'?incident=2' if part == 'incidents' else ''}")
        page.wait_for_function(DRAWN)
        if part == "logs":
            page.locator(".log-line").first.wait_for()
        if part == "events":
            page.locator(".event-line").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), part
        assert_no_violations(page)
    page.goto(f"{scene.address}/ranks")
    page.wait_for_function(DRAWN)
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Workers of this rank").wait_for()
    assert_no_violations(page)


@pytest.mark.story("job page")
def test_new_steps_lines_and_incidents_appear_without_a_reload(
    scene: Scene, job_page: Callable[..., Any]
) -> None:
    page = job_page()
    page.locator("[data-live=live]").wait_for()
    scene.write(lambda store: seed.more_steps(store, scene.big, 5))
    step = f"{scene.big.leg.last:,}"
    page.wait_for_function(
        "step => document.querySelector('.verdict-numbers').innerText.includes(step)", arg=step
    )
    tab(page, "Log")
    page.get_by_text(f"step {scene.big.leg.last} live line").wait_for()
    page.get_by_role("button", name="Pause", exact=True).last.click()
    scene.write(lambda store: seed.more_steps(store, scene.big, 7))
    page.get_by_role("button", name="Resume, 7 new").wait_for()
    assert page.get_by_text(f"step {scene.big.leg.last} live line").count() == 0
    page.get_by_role("button", name="Resume, 7 new").click()
    page.get_by_text(f"step {scene.big.leg.last} live line").wait_for()
    tab(page, "Incidents")
    scene.write(lambda store: seed.open_incident(store, scene.big))
    is_open = page.locator("#incidents .tag.warn", has_text="open")
    is_open.wait_for()
    scene.write(lambda store: seed.close_incident(store, scene.big))
    is_open.wait_for(state="detached")


def test_a_tab_is_a_page_that_a_link_and_the_back_button_reach(
    job_page: Callable[..., Any],
) -> None:
    page = job_page()
    tab(page, "Charts")
    expect(page).to_have_url(re.compile("/charts$"))
    expect(page).to_have_title("atlas-7b: Charts · Holdfast")
    page.keyboard.press("3")
    expect(page).to_have_url(re.compile("/ranks$"))
    page.go_back()
    expect(page.get_by_role("link", name="Charts", exact=True)).to_have_attribute(
        "aria-current", "page"
    )
    page.get_by_role("button", name="Incident 2: hang").click()
    expect(page).to_have_url(re.compile(r"/incidents\?incident=2$"))
    expect(page.locator("#incident-2 .incident-body")).to_be_in_viewport()


def test_a_link_that_is_gone_with_its_tab_leaves_the_keyboard_at_the_tab_it_led_to(
    job_page: Callable[..., Any],
) -> None:
    page = job_page()
    page.get_by_role("link", name="All: Charts").press("Enter")
    expect(page).to_have_url(re.compile("/charts$"))
    expect(page.get_by_role("link", name="Charts", exact=True)).to_be_focused()


@pytest.mark.parametrize(
    ("path", "heading"), [("/jobs/01unknown", "Unknown job"), ("/nonsense", "Page not found")]
)
def test_an_unknown_job_or_page_says_so_and_leads_back(
    scene: Scene, open_page: Callable[..., Any], path: str, heading: str
) -> None:
    """A link without a job is of the server, one with a tab that does not exist of the job."""
    page = open_page(
        scene.server.address + path if path.startswith("/jobs") else scene.address + path
    )
    expect(page.get_by_role("heading", name=heading)).to_be_visible()
    page.locator("[data-live=live]").wait_for()
    page.get_by_role("link", name="All jobs", exact=True).click()
    expect(page).to_have_url(re.compile("/jobs$"))
