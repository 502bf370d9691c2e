"""The frame of all views: help, and the size of the first load."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

from tests.support.service.databases import run_in_thread
from tests.support.service.fake_cluster import three_nodes
from tests.support.service.live_server import LiveServer
from tests.support.web.crowd import add_crowd

FIRST_LOAD_BYTES = 200_000


def prepare_server(server: LiveServer) -> None:
    server.cluster.nodes = three_nodes(roomy=True)  # every job has enough nodes
    run_in_thread(add_crowd(server.settings, 60))


def test_the_first_load_is_small(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    sizes: dict[str, int] = {}
    page = open_page("about:blank")

    def measure(response: Any) -> None:
        if "/api/" not in response.url:
            sizes[response.url] = len(gzip.compress(response.body()))

    page.on("response", measure)
    page.goto(f"{dashboard_server.address}/jobs")
    page.wait_for_selector("[data-job]")
    assert len(sizes) >= 4
    assert sum(sizes.values()) <= FIRST_LOAD_BYTES, sizes
    assert not [
        size for size in sizes if not size.startswith(dashboard_server.address)
    ]  # all from this server


def test_help_lists_the_shortcuts_of_the_view(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs")
    page.wait_for_selector("[data-job]")
    page.keyboard.press("?")
    help_ = page.get_by_role("dialog", name="Keyboard shortcuts")
    help_.wait_for()
    assert "Next job" in help_.inner_text()
    page.keyboard.press("g")  # shortcuts are inactive behind a dialog
    page.keyboard.press("c")
    page.keyboard.press("Escape")
    help_.wait_for(state="hidden")
    assert page.url.endswith("/jobs")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/cluster")
    page.keyboard.press("g")
    page.keyboard.press("j")
    page.wait_for_url("**/jobs")
    page.keyboard.press("c")
    page.wait_for_url("**/submit")
