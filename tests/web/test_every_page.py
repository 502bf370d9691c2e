"""Every page of the dashboard, with the jobs of the gallery: accessible, no wider than its window,
without an error in the console, and without the traces of a value that is missing.

Each page is opened in one of the views, in rotation. With HOLDFAST_SCREENSHOTS=1 (`make
screenshots`) each is opened in all of them, its picture is left in `build/gallery`, and the
pictures of the documentation are renewed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.live_server import LiveServer
from tests.support.web.gallery import JOBS, gallery
from tests.web.conftest import (
    PHONE,
    TIMEOUT_MS,
    violations,
    watch_errors,
)

TAKE_SCREENSHOTS = os.environ.get("HOLDFAST_SCREENSHOTS") == "1"
ROOT = Path(__file__).parents[2]
TABS = ("", *("/charts", "/ranks", "/incidents", "/logs", "/checkpoints", "/events", "/spec"))
"""The tabs of a job's page, as paths below it; the first is its overview."""
TABBED = "llama-1b-pretrain"
"""The job whose tabs are opened."""
WIDE = {"viewport": {"width": 1400, "height": 900}}
VIEWS: dict[str, dict[str, Any]] = {
    "light": {**WIDE, "color_scheme": "light"},
    "dark": {**WIDE, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "is_mobile": True, "has_touch": True},
}
PAGES = {
    "jobs": "/jobs",
    "cluster": "/cluster",
    "submit": "/submit",
    **{name: f"/jobs/{{{name}}}" for name in JOBS},
    **{f"{TABBED}{tab.replace('/', '-')}": f"/jobs/{{{TABBED}}}{tab}" for tab in TABS[1:]},
    "unknown-job": "/jobs/00000000-0000-7000-8000-000000000000",
    "unknown-path": "/jobs/a/b/c",
}
"""By name; fields are the ids of jobs."""
PICTURES = {(TABBED, "light"): "job-light"}
"""(page, view) -> the picture of the documentation, in docs/screenshots."""

IS_COMPLETE = """() => document.querySelector('main')?.innerText.trim()
  && !document.querySelector('[aria-busy=true], .ghost')"""
MISSING_VALUES = """() => {
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { data, parentElement } = texts.currentNode;
    const word = data.match(/\\b(undefined|NaN|null)\\b/);
    // What users or their programs wrote may have such words.
    if (word && !parentElement.closest('pre, code, textarea, script, .spec-lines, .log-line')
        && parentElement.checkVisibility()) found.push(`${word[0]} in "${data.trim()}"`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The server of the gallery, and the ids of its jobs."""
    server = LiveServer(tmp_path_factory.mktemp("gallery"))
    try:
        ids = gallery(server)
        yield server.address, ids
    finally:
        server.stop()


@pytest.mark.xdist_group("gallery")
@pytest.mark.story("every page")
@pytest.mark.parametrize("view", VIEWS)
def test_every_page_is_sound(browser: Any, address: tuple[str, dict[str, str]], view: str) -> None:
    server, ids = address
    context = browser.new_context(timezone_id="UTC", reduced_motion="reduce", **VIEWS[view])
    page, errors = context.new_page(), list[str]()
    page.set_default_timeout(TIMEOUT_MS)
    watch_errors(page, errors)
    faults: dict[str, list[Any]] = {}
    for name in pages_of(view):
        page.goto(server + PAGES[name].format(**ids))
        page.wait_for_function(IS_COMPLETE)
        if found := [*faults_of(page), *(("console", [error]) for error in errors)]:
            faults[name] = found
        errors.clear()
        if TAKE_SCREENSHOTS:
            take_pictures(page, name, view)
    context.close()
    assert faults == {}


def pages_of(view: str) -> list[str]:
    """The pages that are opened in this view."""
    if TAKE_SCREENSHOTS:
        return [*PAGES]
    return [*PAGES][[*VIEWS].index(view) :: len(VIEWS)]


def faults_of(page: Any) -> list[tuple[str, list[str]]]:
    """(broken rule, where): those of axe, which has one for headings, and two of our own."""
    found = violations(page)
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        found.append(("scrolls sideways", []))
    if missing := page.evaluate(MISSING_VALUES):
        found.append(("missing value", missing))
    return found


def take_pictures(page: Any, name: str, view: str) -> None:
    folder = ROOT / "build" / "gallery" / view
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"), full_page=True, animations="disabled")
    if picture := PICTURES.get((name, view)):
        target = ROOT / "docs" / "screenshots" / f"{picture}.png"
        page.screenshot(path=str(target), animations="disabled")
