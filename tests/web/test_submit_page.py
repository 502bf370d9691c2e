"""The submit page: a spec is validated while it is typed, with faults at their lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.support.service.live_server import LiveServer
from tests.support.waiting import DEADLINE_S
from tests.web.conftest import save_screenshot, submitted

GOOD = """name: typed
train: {steps: 5, schedule: {name: constant, warmup_steps: 0}}
parallel: {dp_shard: 2, tp: 2}
resources: {workers_per_node: 2, standby_nodes: 1}
"""
BAD = GOOD.replace("tp: 2}", "tp: 3}").replace("steps: 5", "stepz: 5")


def wait_for_verdict(page: Any, text: str) -> None:
    page.locator(".validation-head", has_text=text).wait_for()


def test_faults_appear_at_their_lines_while_typing(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    wait_for_verdict(page, "ready to submit")  # the example
    save_screenshot(page, "submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill(BAD)
    wait_for_verdict(page, "fault")
    faulty = page.locator(".editor-line.faulty .editor-number").all_inner_texts()
    assert faulty[:2] == ["2", "3"]
    assert page.locator(".wrong").first.inner_text() == "stepz"
    assert page.get_by_role("button", name="Submit", exact=True).is_disabled()
    save_screenshot(page, "submit-faults")
    page.locator(".validation li button", has_text="parallel.tp").first.click()
    selection = "field => field.value.slice(field.selectionStart, field.selectionEnd)"
    assert page.locator("textarea").evaluate(selection) == "tp"
    assert not httpx.get(f"{dashboard_server.address}/api/v1/jobs", timeout=DEADLINE_S).json()[
        "items"
    ]  # nothing was created


def test_an_unparsable_text_is_reported(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill("name: [unfinished\ntrain: {")
    wait_for_verdict(page, "cannot be parsed")


def test_the_field_at_the_cursor_is_explained(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill("train:\n  micro_batch: 4")
    page.locator(".hint", has_text="Samples per rank and forward pass").wait_for()
    assert "default 4" in page.locator(".hint").inner_text()


@pytest.mark.story("submit page")
def test_a_job_is_submitted_once(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill(GOOD)
    wait_for_verdict(page, "ready to submit")
    page.keyboard.press("Control+Enter")
    page.wait_for_url("**/jobs/*")
    jobs = httpx.get(
        f"{dashboard_server.address}/api/v1/jobs", params={"name": "typed"}, timeout=DEADLINE_S
    ).json()["items"]
    assert [job["id"] for job in jobs] == [page.url.rpartition("/")[2]]


def test_a_draft_is_kept_and_examples_replace_it(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill("name: draft")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.wait_for_url("**/jobs")
    page.go_back()
    page.wait_for_function("() => document.querySelector('textarea')?.value === 'name: draft'")
    for index, name in enumerate(
        ("stdlib-lm", "first-steps", "replicated", "my-script", "llama-gpu")
    ):
        page.get_by_label("Start from an example").select_option(str(index))
        page.wait_for_function(
            f"() => document.querySelector('textarea').value.includes('name: {name}')"
        )


def test_json_is_a_spec_too(open_page: Callable[..., Any], dashboard_server: LiveServer) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill('{\n "name": "x",\n "train": {"steps": 0}\n}')
    wait_for_verdict(page, "1 fault")
    assert page.locator(".editor-line.faulty .editor-number").all_inner_texts() == ["3"]


def test_a_copy_contains_the_non_default_fields(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    job = submitted(dashboard_server, name="original")
    page = open_page(f"{dashboard_server.address}/submit?from={job}")
    page.wait_for_function("() => document.querySelector('textarea')?.value.includes('original')")
    text = page.get_by_role("textbox", name="Spec").input_value()
    assert "dp_shard: 2" in text
    assert "clip_grad_norm" not in text  # a default
    wait_for_verdict(page, "ready to submit")
