"""The page of a job of a thousand ranks: live updates, the brush, incidents, keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.web import seed
from tests.support.web.scene import DRAWN, Scene, open_drawn_page, open_scene
from tests.web.conftest import PHONE, TAKE_SCREENSHOTS, assert_no_violations, save_screenshot


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    size = seed.Size(steps=20_000, events=1_500, log_lines=6_000)
    with open_scene(
        tmp_path_factory.mktemp("big"), seed.Size() if TAKE_SCREENSHOTS else size
    ) as found:
        yield found


@pytest.fixture
def job_page(scene: Scene, open_page: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query="", **options: open_drawn_page(
        open_page, f"{scene.address}{query}", **options
    )


@pytest.mark.slow
def test_the_brush_filters_the_sections_below_and_is_in_the_url(
    scene: Scene, job_page: Callable[..., Any]
) -> None:
    page = job_page()
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
    page.locator("#logs").scroll_into_view_if_needed()
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
    page = job_page()
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
    page = job_page()
    page.locator("#logs").scroll_into_view_if_needed()
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
    page = job_page()
    page.locator("#spec").scroll_into_view_if_needed()
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
        ({"light": "light", "dark": "dark"}, {}),
        ({"phone": "dark"}, {"viewport": PHONE, "has_touch": True}),
    ],
    ids=["wide", "phone"],
)
def test_axe_finds_no_violations(
    scene: Scene, job_page: Callable[..., Any], schemes: dict[str, Any], options: Any
) -> None:
    page = job_page("?incident=2", **options)
    for name, scheme in schemes.items():
        page.emulate_media(color_scheme=scheme)
        _check_all_sections(scene, page, name)
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")


def _check_all_sections(scene: Scene, page: Any, name: str) -> None:
    for part in ("logs", "checkpoints", "events", "spec"):
        page.locator(f"#{part}").scroll_into_view_if_needed()
    page.locator(".spec-lines").wait_for()
    page.locator(".event-line").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
    assert_no_violations(page)
    page.evaluate("scrollTo(0, 0)")
    scene.write(lambda store: seed.more_steps(store, scene.big, 1))  # the data is fresh
    page.locator(".verdict-fresh:not(.stale)").wait_for()
    save_screenshot(page, f"job-{name}")
    page.locator("#incidents").scroll_into_view_if_needed()
    save_screenshot(page, f"job-{name}-incidents")
    page.locator("#logs").scroll_into_view_if_needed()
    save_screenshot(page, f"job-{name}-log")
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Workers of this rank").wait_for()
    assert_no_violations(page)
    save_screenshot(page, f"job-{name}-rank")


@pytest.mark.story("job page")
def test_new_steps_lines_and_incidents_appear_without_a_reload(
    scene: Scene, job_page: Callable[..., Any]
) -> None:
    page = job_page()
    page.locator("[data-live=live]").wait_for()
    page.locator("#logs").scroll_into_view_if_needed()
    page.locator(".log-line").first.wait_for()
    scene.write(lambda store: seed.more_steps(store, scene.big, 5))
    page.get_by_text(f"step {scene.big.leg.last} live line").wait_for()
    step = f"{scene.big.leg.last:,}"
    page.wait_for_function(
        "step => document.querySelector('.verdict-numbers').innerText.includes(step)", arg=step
    )
    page.get_by_role("button", name="Pause", exact=True).last.click()
    scene.write(lambda store: seed.more_steps(store, scene.big, 7))
    page.get_by_role("button", name="Resume, 7 new").wait_for()
    assert page.get_by_text(f"step {scene.big.leg.last} live line").count() == 0
    page.get_by_role("button", name="Resume, 7 new").click()
    page.get_by_text(f"step {scene.big.leg.last} live line").wait_for()
    scene.write(lambda store: seed.open_incident(store, scene.big))
    is_open = page.locator(f"#incident-{scene.big.incidents} .tag.warn", has_text="open")
    is_open.wait_for()
    scene.write(lambda store: seed.close_incident(store, scene.big))
    is_open.wait_for(state="detached")
