"""Ended jobs are removed with their history, on request and by age; checkpoints by choice."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.rest.test_jobs import submitted
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.service.saved_checkpoints import held_back, root_of, saved
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.services.checkpoints import CheckpointService
from holdfast_service.services.job_removal import JobRemoval
from holdfast_service.store.engine import Store
from holdfast_service.views.jobs import RemovedJobView
from holdfast_workers.checkpoint import marks
from holdfast_workers.checkpoint.manifest import checkpoint_folder

__all__ = ["held_back"]


@pytest.fixture
def ended(server: LiveServer, client: Client) -> str:
    """A job that has ended, with checkpoints of two steps and all kinds of rows."""
    job = client.submit({**SPEC, "labels": {"owner": "ada"}})
    supervisor = server.run_job(job.id, end=False)
    saved(server, client, job.id, {2: 1.5, 4: 1.1})
    supervisor.end()
    eventually(lambda: client.get(job.id).released)
    return job.id


def rows_of(server: LiveServer, job_id: str) -> dict[str, int]:
    """Table -> number of rows of the job, of tables with any."""
    found: dict[str, int] = {}
    with closing(sqlite3.connect(server.settings.data_dir / "holdfast.db")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            column = "id" if table == "jobs" else "job_id"
            if column in columns:
                of_job = f"SELECT count(*) FROM {table} WHERE {column} = ?"
                (count,) = database.execute(of_job, (job_id,)).fetchone()
                found |= {table: count} if count else {}
    return found


async def completed(server: LiveServer, now: float) -> list[str]:
    """The jobs whose removal another server completes."""
    store = await Store.open(server.settings)
    try:
        checkpoints = CheckpointService(store, server.settings)
        return await JobRemoval(store, checkpoints, server.settings).complete_begun(now)
    finally:
        await store.close()


def folder(server: LiveServer, job_id: str, step: int) -> Path:
    return Path(root_of(server, job_id).uri) / checkpoint_folder(step, 1)


@pytest.mark.seconds
def test_an_ended_job_goes_with_its_history_and_its_checkpoints_stay(
    server: LiveServer, http: httpx.Client, ended: str
) -> None:
    other = submitted(http)
    before = rows_of(server, other)
    assert len(rows_of(server, ended)) >= 6
    answer = http.delete(f"/api/v1/jobs/{ended}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["removed_checkpoints"] == []
    assert len(answer.json()["kept_checkpoints"]) == 2
    assert rows_of(server, ended) == {}
    assert rows_of(server, other).keys() >= before.keys()
    assert folder(server, ended, 2).exists()
    assert http.get(f"/api/v1/jobs/{ended}").json()["code"] == "job_not_found"
    assert http.delete(f"/api/v1/jobs/{ended}").json() == answer.json(), "it can be repeated"
    assert [row["id"] for row in http.get("/api/v1/jobs").json()["items"]] == [other]


@pytest.mark.seconds
def test_checkpoints_go_if_asked_but_none_if_one_is_pinned(
    server: LiveServer, client: Client, http: httpx.Client, ended: str
) -> None:
    client.pin_checkpoint(ended, 4)
    at = f"/api/v1/jobs/{ended}?checkpoints=remove"
    refused = http.delete(at)
    assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_pinned")
    assert folder(server, ended, 2).exists()
    client.unpin_checkpoint(ended, 4)
    answer = http.delete(at)
    assert len(answer.json()["removed_checkpoints"]) == 2, answer.text
    assert not folder(server, ended, 2).exists()
    assert not folder(server, ended, 4).exists()


@pytest.mark.seconds
@pytest.mark.parametrize("by_server", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
def test_an_interrupted_removal_is_completed_by_a_server_or_by_repeating_it(
    server: LiveServer,
    client: Client,
    ended: str,
    monkeypatch: pytest.MonkeyPatch,
    claimed: bool,
    by_server: bool,
) -> None:
    """The server dies at the second checkpoint, before or after its row says that it is removed."""
    method = "_remove_claimed" if claimed else "_claim"
    whole = getattr(CheckpointService, method)
    calls = []

    async def dies_at_the_second(self: CheckpointService, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the server dies")
        await whole(self, *args)

    monkeypatch.setattr(CheckpointService, method, dies_at_the_second)
    with pytest.raises(Exception, match="unexpected"):
        client.remove(ended, with_checkpoints=True)
    assert client.get(ended).state == "SUCCEEDED", "the job is still there, with one checkpoint"
    left = [step for step in (2, 4) if folder(server, ended, step).exists()]
    assert len(left) == 1
    if by_server:
        assert asyncio.run(completed(server, time.time() + 3600)) == [ended]
        assert len(client.remove(ended, with_checkpoints=True).removed_checkpoints) == 1
    else:
        assert len(client.remove(ended).removed_checkpoints) == 1
    assert not folder(server, ended, left[0]).exists()
    assert rows_of(server, ended) == {}


def test_a_job_waits_for_checkpoints_that_are_being_removed(
    server: LiveServer, client: Client, ended: str, held_back: threading.Event
) -> None:
    removed: list[RemovedJobView] = []

    def remove() -> None:
        with Client(server.address) as own:
            removed.append(own.remove(ended, with_checkpoints=True))

    first, second = (threading.Thread(target=remove) for _ in range(2))
    first.start()
    try:
        eventually(lambda: any(item.deleted_at for item in client.checkpoints(ended).items))
        second.start()
    finally:
        held_back.set()
    for call in (first, second):
        call.join(DEADLINE_S)
    assert len(removed) == 2
    assert not any(folder(server, ended, step).exists() for step in (2, 4))


@pytest.mark.seconds
def test_a_change_during_a_removal_comes_too_late_to_refuse_it(
    server: LiveServer, http: httpx.Client, ended: str, held_back: threading.Event
) -> None:
    at = f"/api/v1/jobs/{ended}"
    read_as = {"If-Match": http.get(at).headers["ETag"]}
    answers: list[httpx.Response] = []

    def remove() -> None:
        with httpx.Client(base_url=server.address, timeout=60) as own:
            answers.append(own.delete(f"{at}?checkpoints=remove", headers=read_as))

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        removed = f"{at}/checkpoints"
        eventually(lambda: any(each["deleted_at"] for each in http.get(removed).json()["items"]))
        labelled = http.patch(at, json={"labels": {"kept": "no"}})
        assert labelled.status_code == 200, labelled.text
    finally:
        held_back.set()
    removing.join(DEADLINE_S)
    assert [answer.status_code for answer in answers] == [200], answers[0].text
    assert http.get(at).status_code == 404


@pytest.mark.seconds
def test_a_refused_removal_is_forgotten(client: Client, http: httpx.Client, ended: str) -> None:
    """The next one is decided anew: by the job as it is then."""
    at = f"/api/v1/jobs/{ended}"
    read_as = {"If-Match": http.get(at).headers["ETag"]}
    client.pin_checkpoint(ended, 4)
    assert http.delete(f"{at}?checkpoints=remove", headers=read_as).status_code == 409
    client.unpin_checkpoint(ended, 4)
    http.patch(at, json={"labels": {"owner": "bo"}})
    for checkpoints in ("remove", "keep"):
        refused = http.delete(f"{at}?checkpoints={checkpoints}", headers=read_as)
        assert (refused.status_code, refused.json()["code"]) == (412, "job_changed")
    assert len(http.delete(at).json()["kept_checkpoints"]) == 2


@pytest.mark.seconds
def test_a_mark_of_an_ended_job_does_not_keep_checkpoints(
    server: LiveServer, client: Client, ended: str
) -> None:
    marks.mark_needed(
        root_of(server, ended).below(checkpoint_folder(2, 1)),
        "01a1facd-0000-7000-8000-000000000000",  # was never stored
    )
    assert len(client.remove(ended, with_checkpoints=True).removed_checkpoints) == 2


@pytest.mark.seconds
def test_the_command_line_removes_labels_and_cancels_by_filter(
    server: LiveServer,
    client: Client,
    ended: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    assert run(["label", ended, "team=nlp", "owner-"]) == ExitCode.OK
    assert capsys.readouterr().out.strip() == "team=nlp"
    assert client.get(ended).spec["labels"] == {"team": "nlp"}
    assert run(["label", ended, "oops"]) == ExitCode.USAGE
    assert run(["priority", ended, "12"]) == ExitCode.OK
    assert run(["priority", ended, "5000"]) == ExitCode.USAGE
    assert client.get(ended).spec["priority"] == 12
    capsys.readouterr()
    assert run(["remove", ended]) == ExitCode.OK
    printed = capsys.readouterr()
    assert f"removed job {SPEC['name']} ({ended})" in " ".join(printed.out.split())
    assert printed.err.count("kept ") == 2
    of_bo = {**SPEC, "labels": {"owner": "bo"}}
    waiting = [client.submit({**of_bo, "name": f"q{n}"}).id for n in (1, 2)]
    assert run(["cancel"]) == ExitCode.USAGE
    assert run(["cancel", "--owner", "bo"]) == ExitCode.OK
    assert {client.get(job_id).desired for job_id in waiting} == {"cancelled"}
