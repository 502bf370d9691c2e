"""A real browser and a real control plane over an in-memory cluster.

Each module has a server and a browser, each test a browser context. Any error in the console of the
page (a refused script or style included) fails the test.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S

from holdfast import Client
from holdfast.rest.dashboard import FOLDER

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
WIDE = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
TIMEOUT_MS = 1000 * DEADLINE_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.web)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium (package chromium-headless-shell)")
    if not (FOLDER / "index.html").exists():
        pytest.fail("the dashboard is not built: run `make setup`")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, **context options)`; fails the test if the page has logged an error."""
    contexts, errors = list[Any](), list[str]()

    def opened(address: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        watch_errors(page, errors)
        page.goto(address)
        return page

    opened.errors = errors  # type: ignore[attr-defined]
    yield opened
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def dashboard_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A server for the tests of a module, which may prepare it by `prepare_server(server)`."""
    started = LiveServer(tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2]))
    prepare = getattr(request.module, "prepare_server", None)
    if prepare is not None:
        prepare(started)
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def running_job(request: pytest.FixtureRequest, dashboard_server: LiveServer) -> str:
    """The id of a job that has completed three steps; its name is the module's `JOB_NAME`."""
    job = submitted(dashboard_server, name=request.module.JOB_NAME)
    dashboard_server.run_job(job, 3, end=False)
    return job


def submitted(server: LiveServer, **changes: Any) -> str:
    """The id of a new job."""
    with Client(server.address) as client:
        return client.submit({**SPEC, **changes}).id


def watch_errors(page: Any, errors: list[str]) -> None:
    """Add to `errors` what the page will log as an error."""
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console",
        lambda message: errors.append(message.text) if _is_page_error(message) else None,
    )


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe finds: the rule, and the elements that break it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(item["id"], [node["html"][:160] for node in item["nodes"]]) for item in found]


def assert_no_violations(page: Any) -> None:
    """Axe finds nothing."""
    assert violations(page) == []


def _is_page_error(message: Any) -> bool:
    """Whether a console message is an error of the page; the browser also logs responses such as
    422."""
    return message.type == "error" and "Failed to load resource" not in message.text
