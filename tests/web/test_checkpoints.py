"""Checkpoints and actions of a job in a browser, with real files in the remote tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.service.fake_cluster import three_nodes
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.service.saved_checkpoints import report_saved, root_of, saved, spoil
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.operations import OperationState
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import checkpoint_folder

LOSSES = {2: 1.52, 4: 1.11, 6: 1.34}
SMALL = {"dim": 32, "layers": 2, "heads": 2, "sequence_length": 16}
BEST = {"keep": 3, "keep_best": {"metric": "loss"}}


def prepare_server(server: LiveServer) -> None:
    server.cluster.nodes = three_nodes(roomy=True)  # every job has enough nodes


@pytest.fixture(scope="module")
def client(dashboard_server: LiveServer) -> Iterator[Client]:
    with Client(dashboard_server.address) as connected:
        yield connected


@pytest.fixture
def saved_job(dashboard_server: LiveServer, client: Client) -> str:
    """A job that runs, with checkpoints of three steps."""
    spec = {**SPEC, "name": "saved", "checkpoint": {"remote": BEST}}
    found = client.submit(spec)
    dashboard_server.run_job(found.id, end=False)
    saved(dashboard_server, client, found.id, LOSSES)
    return found.id


@pytest.fixture
def checkpoints(open_page: Callable[..., Any], dashboard_server: LiveServer, saved_job: str) -> Any:
    page = open_page(f"{dashboard_server.address}/jobs/{saved_job}/checkpoints")
    page.locator("tbody tr").first.wait_for()
    return page


def line(page: Any, step: int) -> Any:
    return page.locator("tbody tr", has=page.locator("strong", has_text=str(step)))


@pytest.mark.slow
def test_a_checkpoint_is_pinned_and_unpinned(
    checkpoints: Any, client: Client, saved_job: str
) -> None:
    page = checkpoints
    assert page.locator("tbody tr strong").all_inner_texts() == ["6", "4", "2"]
    assert line(page, 4).get_by_text("Best").count() == 1
    line(page, 6).get_by_role("button", name="Pin", exact=True).click()
    line(page, 6).get_by_text("Pinned", exact=True).wait_for()
    assert client.checkpoints(saved_job).items[0].pinned
    assert line(page, 6).get_by_role("button", name="Remove step 6").is_disabled()
    line(page, 6).get_by_role("button", name="Unpin").click()
    line(page, 6).get_by_role("button", name="Pin", exact=True).wait_for()


@pytest.mark.story("checkpoints of a job")
def test_a_verification_finds_a_damaged_checkpoint(
    checkpoints: Any, dashboard_server: LiveServer, saved_job: str
) -> None:
    page = checkpoints
    line(page, 4).get_by_role("button", name="Verify").click()
    line(page, 4).get_by_text("Verified", exact=True).wait_for()
    spoil(Path(root_of(dashboard_server, saved_job).uri) / checkpoint_folder(6, 1))
    line(page, 6).get_by_role("button", name="Verify").click()
    line(page, 6).get_by_text("Damaged:").wait_for()
    assert line(page, 6).get_by_role("link", name="Restart from here").count() == 0


@pytest.mark.slow
def test_an_export_is_saved_by_the_browser(checkpoints: Any, saved_job: str) -> None:
    page = checkpoints
    with page.expect_download() as saving:
        line(page, 4).get_by_role("button", name="Export step 4").click()
    assert saving.value.suggested_filename == "step-00000004.safetensors"
    assert "norm" in load_file(saving.value.path())


@pytest.mark.slow
def test_a_running_verification_is_shown_on_a_new_page_and_can_be_cancelled(
    checkpoints: Any, client: Client, saved_job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, proceed, opened = checkpoints, threading.Event(), LocalStorage.open

    def wait(self: LocalStorage, name: str) -> object:
        assert proceed.wait(60)
        return opened(self, name)

    monkeypatch.setattr(LocalStorage, "open", wait)
    try:
        line(page, 4).get_by_role("button", name="Verify").click()
        line(page, 4).get_by_text("Verifying: 0% read").wait_for()
        page.reload()
        line(page, 4).get_by_text("Verifying: 0% read").wait_for()
        line(page, 4).get_by_role("button", name="Cancel the verification of step 4").click()
        line(page, 4).get_by_role("button", name="Verify").wait_for()
        [operation] = client.operations(saved_job)
        assert operation.state is OperationState.CANCELLED
    finally:
        proceed.set()


@pytest.mark.slow
def test_a_removal_is_confirmed_first(checkpoints: Any, client: Client, saved_job: str) -> None:
    page = checkpoints
    line(page, 2).get_by_role("button", name="Remove step 2").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Back").click()
    assert len(client.checkpoints(saved_job).items) == 3
    line(page, 2).get_by_role("button", name="Remove step 2").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    line(page, 2).wait_for(state="detached")
    page.get_by_label("Show 1 removed").check()
    line(page, 2).wait_for()


@pytest.mark.slow
def test_a_checkpoint_of_another_model_cannot_be_submitted(checkpoints: Any) -> None:
    page = checkpoints
    line(page, 4).get_by_role("link", name="Restart from here").click()
    page.wait_for_url("**/submit?from=*&step=4")
    page.locator("#spec-verdict", has_text="cannot start from").wait_for()
    assert page.get_by_role("button", name="Submit", exact=True).is_disabled()


@pytest.mark.slow
def test_a_new_job_continues_from_a_checkpoint(
    open_page: Callable[..., Any], dashboard_server: LiveServer, client: Client
) -> None:
    job = client.submit({**SPEC, "name": "fitting", "model": SMALL}).id
    dashboard_server.run_job(job, end=False)
    training = JobSpec.model_validate(client.get(job).spec).training()
    report_saved(dashboard_server, job, save_model(root_of(dashboard_server, job), 4, training))
    page = open_page(f"{dashboard_server.address}/jobs/{job}/checkpoints")
    line(page, 4).get_by_role("link", name="Restart from here").click()
    page.wait_for_function("() => document.querySelector('textarea')?.value.includes('init_from')")
    assert f"{job}/4" in page.locator("textarea").input_value()
    page.locator(".validation-head", has_text="ready to submit").wait_for()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/jobs/*")
    restarted = client.get(page.url.rpartition("/")[2])
    assert restarted.origin is not None
    assert (restarted.origin.job, restarted.origin.step) == (job, 4)


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(
    open_page: Callable[..., Any], dashboard_server: LiveServer, client: Client, saved_job: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs/{saved_job}")
    actions = page.get_by_role("group", name="Actions")
    actions.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    assert client.get(saved_job).desired == "running"  # not confirmed
    actions.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    actions.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    eventually(lambda: client.get(saved_job).desired == "running")
    actions.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    eventually(lambda: client.get(saved_job).state.terminal)
    actions.get_by_role("button", name="Cancel").wait_for(state="detached")


def test_a_fault_is_injected(
    open_page: Callable[..., Any], dashboard_server: LiveServer, client: Client, saved_job: str
) -> None:
    page = open_page(f"{dashboard_server.address}/jobs/{saved_job}")
    page.get_by_role("button", name="Inject a fault").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Fault", exact=True).select_option("slow")
    dialog.get_by_label("Rank").fill("99")
    dialog.get_by_label("Slowdown factor").fill("3")
    dialog.get_by_role("button", name="Inject", exact=True).click()
    dialog.get_by_role("alert").first.wait_for()  # there is no rank 99
    dialog.get_by_label("Rank").fill("1")
    dialog.get_by_role("button", name="Inject", exact=True).click()
    dialog.wait_for(state="detached")
    faults = httpx.get(
        f"{dashboard_server.address}/api/v1/jobs/{saved_job}/faults", timeout=DEADLINE_S
    ).json()["items"]
    assert [(fault["kind"], fault["fault"]["rank"]) for fault in faults] == [("slow", 1)]
