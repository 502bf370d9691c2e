"""The page of an elastic job: sizes over time, resizes, the action Resize, and the queue."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.support.service.databases import run_in_thread
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually
from tests.support.web import elastic
from tests.web.conftest import PHONE, assert_no_violations, submitted

from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity, Phase
from holdfast_service.store.engine import Store

STORY: dict[str, str] = {}
"""The id of the job in the store, by the folder of its server."""


def prepare_server(server: LiveServer) -> None:
    server.settings = server.settings.model_copy(update={"reserve_after_s": 0.2})
    machines = (NodeCapacity(f"node{n}", f"127.0.0.{n}", cpus=1.0, gpus=0.0) for n in range(7))
    server.cluster.nodes = Capacity(tuple(machines), can_grow=False)

    async def write() -> None:
        store = await Store.open(server.settings)
        try:
            begin = time.time() - elastic.END
            STORY[str(server.settings.data_dir)] = await elastic.elastic_job(store, begin)
        finally:
            await store.close()

    run_in_thread(write())


@pytest.fixture
def story_page(open_page: Callable[..., Any], dashboard_server: LiveServer) -> Callable[..., Any]:
    job = STORY[str(dashboard_server.settings.data_dir)]

    def opened(tab: str = "", **options: Any) -> Any:
        page = open_page(
            f"{dashboard_server.address}/jobs/{job}{tab}", timezone_id="UTC", **options
        )
        page.locator(".world-slider").wait_for(state="attached")
        return page

    return opened


@pytest.fixture(scope="module")
def elastic_job(dashboard_server: LiveServer) -> str:
    """An elastic job that trains on two of at most three nodes; it takes the last free ones."""
    spec = {
        **elastic.ELASTIC,
        "name": "bendable",
        "resources": {"workers_per_node": 2, "nodes": {"min": 1, "max": 3}},
    }
    job = submitted(dashboard_server, **spec)
    supervisor = dashboard_server.supervisor(job)
    supervisor.form(1, at=time.time())
    supervisor.enter(Phase.RUNNING)
    supervisor.run(1, 1, 3)
    return job


@pytest.mark.slow
def test_the_ribbon_is_as_high_as_the_world(story_page: Callable[..., Any]) -> None:
    page = story_page()
    steps = page.locator(".ribbon-drawing clipPath rect")
    heights = [float(step.get_attribute("height")) for step in steps.all()]
    full = max(heights)
    assert [round(height / full, 2) for height in heights] == [0.16, 1, 0.75, 1]
    legend = page.get_by_role("list", name="Time by size of the world")
    first, second = legend.get_by_role("listitem").all()
    assert "8 ranks on 4 nodes" in first.inner_text() and "dp_shard 4 × tp 2" in first.inner_text()
    assert "6 ranks on 3 nodes" in second.inner_text()


def test_sizes_are_reached_by_pointer_and_keyboard(story_page: Callable[..., Any]) -> None:
    page = story_page()
    plot = page.locator(".ribbon-plot")
    tip = page.locator(".ribbon-tip")

    def shows_the_size() -> bool:
        """Sections that load above may still move the plot away from the pointer."""
        page.mouse.move(0, 0)
        plot.hover(position={"x": plot.bounding_box()["width"] * 0.5, "y": 40})
        shown = " ".join(tip.all_inner_texts()).split()
        return "6 ranks on 3 nodes dp_shard 3 × tp 2" in " ".join(shown)

    eventually(shows_the_size)
    page.mouse.move(0, 0)
    expect(tip).to_have_count(0)  # or its end could come after the keys and hide theirs
    slider = page.get_by_role("slider", name="Size of the world")
    slider.focus()
    expect(slider).to_have_attribute("aria-valuetext", re.compile("^8 ranks on 4 nodes"))
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_attribute(
        "aria-valuetext", re.compile("^6 ranks on 3 nodes, dp_shard 3")
    )
    expect(tip).to_contain_text("6 ranks on 3 nodes")
    page.keyboard.press("Enter")
    page.locator(".brush-chip").wait_for()
    expect(page).to_have_url(re.compile(r"from=.*to="))
    expect(page.get_by_role("listitem").filter(has_text="8 ranks on 4 nodes")).to_have_count(0)
    page.keyboard.press("Escape")
    page.locator(".brush-chip").wait_for(state="detached")


def test_a_chart_that_loads_late_hides_nothing_that_is_pointed_at(
    dashboard_server: LiveServer, open_page: Callable[..., Any]
) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page = open_page("about:blank", timezone_id="UTC")
    page.route("**/metrics?**", hold)
    job = STORY[str(dashboard_server.settings.data_dir)]
    with page.expect_request("**/metrics?**"):
        page.goto(f"{dashboard_server.address}/jobs/{job}")
    page.get_by_role("slider", name="Size of the world").focus()
    page.keyboard.press("ArrowLeft")
    tip = page.locator(".ribbon-tip")
    expect(tip).to_contain_text("6 ranks on 3 nodes")
    assert held, "the charts have asked for nothing yet"
    for route in tuple(held):
        route.continue_()
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_timeout(300)  # the chart draws itself in the next frames
    expect(tip).to_contain_text("6 ranks on 3 nodes")


def test_resizes_are_told_apart_from_faults(story_page: Callable[..., Any]) -> None:
    page = story_page()
    change = "dp_shard 4 × tp 2 → dp_shard 3 × tp 2"
    fault = page.get_by_role(
        "button", name=f"Incident 1: node lost, shrink to a smaller mesh, {change}"
    )
    assert "resize" not in fault.get_attribute("class")
    resize = page.get_by_role("button", name="Incident 2: resize, grow to a larger mesh")
    assert "resize" in resize.get_attribute("class")
    colour = "element => getComputedStyle(element).color"
    assert fault.evaluate(colour) != resize.evaluate(colour)
    resize.click()
    card = page.locator("#incident-2")
    card.locator(".incident-body").wait_for()
    text = card.inner_text()
    for part in (
        "The world grew from 6 to 8 ranks",
        "dp_shard 3 × tp 2 → dp_shard 4 × tp 2",
        "8 ranks have room on 4 nodes since 30 s",
        "grow to a larger mesh",
    ):
        assert part in text, part
    assert card.locator(".tag.resize").count() == 1
    lost = page.locator("#incident-1")
    assert "A node was lost" in lost.inner_text() and change in lost.inner_text()
    assert lost.locator(".tag.resize").count() == 0


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE}])
def test_axe_finds_no_violations(story_page: Callable[..., Any], options: dict[str, Any]) -> None:
    page = story_page("/incidents?incident=2", **options)
    page.locator("#incident-2 .incident-body").wait_for()
    assert_no_violations(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"


@pytest.mark.story("elastic job page")
def test_a_size_is_ordered_by_keyboard(
    open_page: Callable[..., Any], dashboard_server: LiveServer, elastic_job: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs/{elastic_job}")
    figures = page.locator(".verdict-numbers")
    figures.get_by_text("nodes, up to 3").wait_for()
    page.get_by_role("button", name="Resize").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Resize bendable")
    dialog.wait_for()
    sizes = dialog.locator(".sizes")
    expect(sizes).to_contain_text("Present size2 nodes")
    expect(sizes).to_contain_text("as many as the spec allows (3)")
    nodes = dialog.get_by_role("spinbutton", name="Nodes")
    nodes.fill("9")
    expect(dialog.get_by_role("alert")).to_have_text("A whole number from 1 to 3 is needed.")
    assert dialog.get_by_role("button", name="Resize").is_disabled()
    nodes.fill("1")
    page.keyboard.press("Enter")
    dialog.wait_for(state="detached")
    figures.get_by_text("nodes, 1 ordered").wait_for()
    supervisor = dashboard_server.supervisor(elastic_job)
    eventually(lambda: bool(supervisor.sizes) and supervisor.sizes[-1].nodes == 1)
    page.get_by_role("button", name="Resize").click()
    expect(sizes).to_contain_text("Ordered sizeat most 1")
    dialog.get_by_role("radio", name="As many as the spec allows (3)").check()
    dialog.get_by_role("button", name="Resize").click()
    figures.get_by_text("nodes, up to 3").wait_for()
    eventually(lambda: supervisor.sizes[-1].nodes is None)


def test_a_refused_order_shows_the_reason(
    open_page: Callable[..., Any], dashboard_server: LiveServer, elastic_job: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs/{elastic_job}")
    problem = {
        "type": "about:blank",
        "title": "Invalid parameters",
        "status": 422,
        "code": "invalid_parameters",
        "detail": "the job trains on 1 to 3 nodes, not on 2",
        "instance": None,
        "faults": [{"path": "nodes", "message": "the job trains on 1 to 3 nodes, not on 2"}],
    }
    page.route("**/resize**", lambda route: route.fulfill(status=422, json=problem))
    page.get_by_role("button", name="Resize").click()
    dialog = page.get_by_role("dialog", name="Resize bendable")
    dialog.get_by_role("spinbutton", name="Nodes").fill("2")
    dialog.get_by_role("button", name="Resize").click()
    expect(dialog.get_by_role("alert")).to_have_text("the job trains on 1 to 3 nodes, not on 2")


def test_a_job_of_one_size_has_no_resize_and_a_flat_ribbon(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    fixed = submitted(dashboard_server, name="fixed")
    page = open_page(f"{dashboard_server.address}/jobs/{fixed}")
    page.locator(".ribbon-drawing rect").first.wait_for(state="attached")
    page.get_by_role("button", name="Cancel").wait_for()
    assert page.get_by_role("button", name="Resize").count() == 0
    assert page.locator(".ribbon-drawing clipPath rect").count() == 1
    assert page.locator(".world-slider").count() == 0
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    page.get_by_text("Cancelled", exact=True).first.wait_for()


@pytest.mark.slow
def test_a_queued_job_shows_its_place_its_reason_and_the_reservation(
    open_page: Callable[..., Any], dashboard_server: LiveServer, elastic_job: str
) -> None:
    address = dashboard_server.address
    jobs = {}
    for name, nodes in (("large", 3), ("next", 4), ("small", 1)):  # the cluster has seven nodes
        jobs[name] = submitted(
            dashboard_server,
            name=name,
            parallel={"dp_shard": nodes, "tp": 2},
            resources={"workers_per_node": 2},
            train={**SPEC["train"], "global_batch": 48},
        )
    page = open_page(f"{address}/jobs?state=QUEUED")
    large = page.locator(f"[data-job='{jobs['large']}']")
    small = page.locator(f"[data-job='{jobs['small']}']")
    expect(large).to_contain_text("3 reserved")
    expect(large).to_contain_text("No. 1 in the queue")
    expect(large).to_contain_text("3 nodes with 1 CPU and 0 GPUs free are needed")
    expect(page.locator(f"[data-job='{jobs['next']}']")).to_contain_text("4 reserved")
    expect(small).to_contain_text("No. 3 in the queue")
    reserved = "3 are reserved for large, and 4 for others before it"
    expect(small.get_by_title(re.compile(reserved))).to_have_count(1)
    small.get_by_role("link", name="small").click()
    notice = page.locator(".wait")
    expect(notice).to_contain_text("No. 3 in the queue")
    notice.get_by_role("link", name="Nodes are reserved for large").click()
    page.get_by_role("heading", name="large").wait_for()
    expect(page.locator(".verdict-doing")).to_contain_text("3 are reserved for it")
    page.goto(f"{address}/cluster")
    queue = page.get_by_role("region", name="Queue")
    expect(queue.get_by_role("listitem").first).to_contain_text("3 reserved")
