"""A browser is let in by a link with a code, and works like any other from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.service.live_server import LiveServer, live_server
from tests.web.test_submit_page import GOOD

from holdfast.cli.dashboard import dashboard_link
from holdfast.rest.local_access import LocalAccess


@pytest.fixture(scope="module")
def access() -> LocalAccess:
    return LocalAccess("a-token-of-the-tests-" + "0" * 32)


@pytest.fixture(scope="module")
def locked(access: LocalAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("locked"), access=access) as server:
        yield server


def notice(page: Any) -> Any:
    return page.get_by_role("alert").filter(has_text="This browser is not signed in")


@pytest.mark.story("sign in page")
def test_a_link_lets_one_browser_in(
    open_page: Callable[..., Any], locked: LiveServer, access: LocalAccess
) -> None:
    stranger = open_page(f"{locked.address}/jobs")
    notice(stranger).wait_for()
    link = dashboard_link(locked.address, access.issue_code(), "/submit")
    page = open_page(link)
    page.locator(".validation-head", has_text="ready to submit").wait_for()
    assert page.url == f"{locked.address}/submit", "the code is gone from the address"
    page.get_by_role("textbox", name="Spec").fill(GOOD)
    page.locator(".validation-head", has_text="ready to submit").wait_for()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/jobs/*")
    job_id = page.url.rpartition("/")[2]
    locked.run_job(job_id, 3)
    page.get_by_text("Succeeded").first.wait_for()

    tab = page.context.new_page()
    tab.goto(f"{locked.address}/jobs/{job_id}")
    tab.get_by_text("Succeeded").first.wait_for()
    again = open_page(link)
    notice(again).wait_for()
    again.get_by_text("the link was used").wait_for()
    again.goto(dashboard_link(locked.address, access.issue_code()))
    again.wait_for_selector("[data-job]")


def test_a_page_whose_server_was_started_again_says_so_and_goes_on_after_the_next_link(
    open_page: Callable[..., Any], locked: LiveServer, access: LocalAccess
) -> None:
    page = open_page(dashboard_link(locked.address, access.issue_code(), "/cluster"))
    page.wait_for_selector("[data-node]")
    access._sessions.clear()  # as at a start
    page.reload()
    notice(page).wait_for()
    here = dashboard_link(locked.address, access.issue_code(), "/cluster")
    page.evaluate("link => { location.href = link; }", here)  # the tab that asked for it
    page.wait_for_selector("[data-node]")
    access._sessions.clear()
    page.reload()
    notice(page).wait_for()
    other = page.context.new_page()
    other.goto(dashboard_link(locked.address, access.issue_code(), "/cluster"))
    other.wait_for_selector("[data-node]")
    page.reload()
    page.wait_for_selector("[data-node]")
