"""The one stream of a tab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.api.live_server import LiveServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    started = LiveServer(tmp_path_factory.mktemp("live"))
    started.start()
    yield started
    started.stop()


def test_a_tab_has_one_stream(open_page: Callable[..., Any], server: LiveServer) -> None:
    streams: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda one: "/api/v1/live" in one.url and streams.append(one.url))
    page.goto(f"{server.address}/jobs")
    page.wait_for_selector("[data-live=live]")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Cluster").wait_for()
    page.wait_for_timeout(200)
    assert len(streams) == 1
