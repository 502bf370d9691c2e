"""Checkpoints over REST, the Python client and the command line, on real files."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.support.checkpoint.model_checkpoint import save_model
from tests.support.checkpoint.saved_worlds import global_state, save_world
from tests.support.faults.flaky_proxy import FlakyProxy
from tests.support.service.live_server import SPEC, LiveServer, live_server
from tests.support.service.saved_checkpoints import (
    MESH,
    held_back,
    report_saved,
    root_of,
    saved,
    spoil,
)
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.client import http_answers
from holdfast.errors import Conflict, NotFound, ServerError
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.lifecycle import State
from holdfast_service.job_model.operations import OperationState
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import (
    MANIFEST,
    QUARANTINED,
    checkpoint_folder,
    list_checkpoints,
)
from holdfast_workers.checkpoint.marks import mark_needed
from holdfast_workers.checkpoint.storage import Storage, StorageDenied, TransientStorageError

__all__ = ["held_back"]
BEST = {"keep": 3, "keep_best": {"metric": "loss"}}
LOSSES = {2: 1.5, 4: 1.1, 6: 1.3}


@pytest.fixture
def job_id(server: LiveServer, client: Client) -> str:
    """A job that runs, with checkpoints of three steps."""
    job = client.submit({**SPEC, "checkpoint": {"remote": BEST}})
    server.run_job(job.id, end=False)
    saved(server, client, job.id, LOSSES)
    return job.id


def _steps(client: Client, job_id: str) -> list[int]:
    return [
        checkpoint.step
        for checkpoint in client.checkpoints(job_id).items
        if checkpoint.deleted_at is None
    ]


def _exported(client: Client, job_id: str, step: int) -> str:
    """The path of the file of an export."""
    *_, operation = client.prepare_export(job_id, step)
    return f"/api/v1/operations/{operation.id}/content"


def _folder(server: LiveServer, job_id: str, step: int) -> Path:
    return Path(root_of(server, job_id).uri) / checkpoint_folder(step, 1)


def test_the_list_shows_the_content_of_each_tier(
    server: LiveServer, client: Client, job_id: str
) -> None:
    mark_needed(root_of(server, job_id).below(checkpoint_folder(2, 1)), "job-b")
    client.pin_checkpoint(job_id, 6)
    found = client.checkpoints(job_id)
    assert found.memory.protected_step is None  # no row reports a protected step
    assert [(checkpoint.step, checkpoint.metrics["loss"]) for checkpoint in found.items] == [
        (6, 1.3),
        (4, 1.1),
        (2, 1.5),
    ]
    assert [checkpoint.best for checkpoint in found.items] == [False, True, False]
    assert [checkpoint.pinned for checkpoint in found.items] == [True, False, False]
    assert [checkpoint.needed_by for checkpoint in found.items] == [(), (), ("job-b",)]
    assert found.storage_problem is None


def test_the_listed_checkpoints_have_the_loss_of_their_evaluations(
    server: LiveServer,
    client: Client,
    job_id: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"loss": 1.0, "eval_loss": 1.25}
    report_saved(server, job_id, save_world(root_of(server, job_id), 8, 1, MESH, 8, metrics))
    eventually(lambda: 8 in _steps(client, job_id))
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    assert run(["checkpoint", "ls", job_id, "-o", "wide"]) == ExitCode.OK
    _, head, *rows = capsys.readouterr().out.splitlines()
    shown = head.index("EVAL LOSS")
    assert [row[shown : shown + 9].strip() for row in rows] == ["1.2500", "-", "-", "-"]


def test_a_verification_reports_its_progress_and_its_result(
    server: LiveServer, client: Client, job_id: str
) -> None:
    reports = list(client.verify_checkpoint(job_id, 4))
    assert reports[-1].state is OperationState.SUCCEEDED
    assert reports[-1].bad is None
    assert 0 < reports[-1].done_bytes <= (reports[-1].total_bytes or 0)
    spoil(_folder(server, job_id, 6))
    last = list(client.verify_checkpoint(job_id, 6))[-1]
    assert "__1_0.distcp" in str(last.bad)
    by_step = {checkpoint.step: checkpoint for checkpoint in client.checkpoints(job_id).items}
    assert by_step[4].verified_at is not None
    assert by_step[6].bad == last.bad
    assert (_folder(server, job_id, 6) / QUARANTINED).exists()
    kinds = [event.kind for event in client.events(job_id).items]
    assert kinds[-2:] == ["checkpoint.verified", "checkpoint.bad"]


@pytest.mark.seconds
def test_a_pinned_checkpoint_stays_until_it_is_unpinned(client: Client, job_id: str) -> None:
    assert client.pin_checkpoint(job_id, 4).pinned
    assert client.pin_checkpoint(job_id, 4).pinned
    with pytest.raises(Conflict, match="unpin") as refused:
        client.remove_checkpoint(job_id, 4)
    assert refused.value.code == "checkpoint_pinned"
    assert client.unpin_checkpoint(job_id, 4).pinned is False
    client.remove_checkpoint(job_id, 4)
    assert _steps(client, job_id) == [6, 2]
    with pytest.raises(NotFound) as gone:
        client.remove_checkpoint(job_id, 4)
    assert gone.value.code == "checkpoint_not_found"


@pytest.mark.seconds
def test_the_only_intact_checkpoint_of_a_live_job_is_not_removed(
    server: LiveServer, client: Client, job_id: str
) -> None:
    (_folder(server, job_id, 2) / "__0_0.distcp").unlink()  # not detected yet
    spoil(_folder(server, job_id, 4))
    list(client.verify_checkpoint(job_id, 4))
    with pytest.raises(Conflict) as refused:
        client.remove_checkpoint(job_id, 6)
    assert refused.value.code == "last_checkpoint"
    client.remove_checkpoint(job_id, 4)  # a damaged checkpoint may be removed
    server.supervisor(job_id).end()
    eventually(lambda: client.get(job_id).state is State.SUCCEEDED)
    client.remove_checkpoint(job_id, 6)
    assert not _folder(server, job_id, 6).exists()


@pytest.mark.seconds
def test_two_concurrent_removals_leave_a_checkpoint(client: Client, job_id: str) -> None:
    client.remove_checkpoint(job_id, 2)

    def remove(step: int) -> bool:
        with Client(client.address) as own:
            try:
                own.remove_checkpoint(job_id, step)
            except Conflict as refused:
                assert refused.code == "last_checkpoint"
                return False
        return True

    with ThreadPoolExecutor(2) as both:
        assert sorted(both.map(remove, (4, 6))) == [False, True]
    assert len(_steps(client, job_id)) == 1


@pytest.mark.slow
def test_a_checkpoint_in_slow_removal_does_not_count_and_is_removed_in_the_end(
    tmp_path: Path, held_back: threading.Event
) -> None:
    with (
        live_server(tmp_path, {"storage_deadline_s": 2.0}) as server,
        Client(server.address, retry_s=0.1) as client,
        ExitStack() as last,
    ):
        last.callback(held_back.set)
        job = client.submit(SPEC)
        server.run_job(job.id, end=False)
        saved(server, client, job.id, {4: 1.1, 6: 1.3})
        for _ in "once", "again":
            with pytest.raises(ServerError, match="being removed"):
                client.remove_checkpoint(job.id, 6)
        with pytest.raises(Conflict) as refused:
            client.remove_checkpoint(job.id, 4)
        assert refused.value.code == "last_checkpoint"
        held_back.set()
        eventually(lambda: not _folder(server, job.id, 6).exists())
        assert _steps(client, job.id) == [4]


@pytest.mark.seconds
def test_a_failed_removal_leaves_a_usable_checkpoint_or_none(
    server: LiveServer, client: Client, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LocalStorage.delete

    def keeps_manifests(self: LocalStorage, name: str) -> None:
        if name == MANIFEST:
            raise TransientStorageError(self.uri, "not now")
        delete(self, name)

    def fails(self: LocalStorage) -> None:
        raise TransientStorageError(self.uri, "not now")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "delete", keeps_manifests)
        with (
            Client(client.address, retry_s=0.1) as hasty,
            pytest.raises(ServerError, match="not now"),
        ):
            hasty.remove_checkpoint(job_id, 6)
    assert client.pin_checkpoint(job_id, 6).pinned
    client.unpin_checkpoint(job_id, 6)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "delete_all", fails)
        client.remove_checkpoint(job_id, 6)  # without a manifest it is no checkpoint
    assert _steps(client, job_id) == [4, 2]
    event = client.events(job_id).items[-1]
    assert (event.kind, "not now" in event.data["why"]) == ("checkpoint.deleted", True)


@pytest.mark.seconds
def test_a_checkpoint_needed_by_another_live_job_is_not_removed(
    server: LiveServer, client: Client, job_id: str
) -> None:
    other = client.submit(SPEC)
    at = root_of(server, job_id).below(checkpoint_folder(2, 1))
    mark_needed(at, other.id)
    with pytest.raises(Conflict, match=other.id) as refused:
        client.remove_checkpoint(job_id, 2)
    assert refused.value.code == "checkpoint_needed"
    client.cancel(other.id)
    assert client.wait(other.id, DEADLINE_S).state is State.CANCELLED
    client.remove_checkpoint(job_id, 2)
    assert _steps(client, job_id) == [6, 4]


def test_an_export_is_the_whole_model_with_the_stated_length(
    http: httpx.Client, client: Client, job_id: str, tmp_path: Path
) -> None:
    answer = http.get(_exported(client, job_id, 4))
    assert int(answer.headers["content-length"]) == len(answer.content)
    progress: list[tuple[int, int]] = []
    target = tmp_path / "model.safetensors"
    nbytes = client.export_checkpoint(
        job_id, 4, target, on_bytes=lambda *counts: progress.append(counts)
    )
    assert target.read_bytes() == answer.content
    assert progress[-1] == (nbytes, nbytes)
    model = {name: values for name, values in global_state(4).items() if name.startswith("model.")}
    loaded = load_file(target)
    assert set(loaded) == {name.removeprefix("model.") for name in model}
    for name, values in model.items():
        assert np.array_equal(loaded[name.removeprefix("model.")], values)


@pytest.mark.seconds
def test_an_export_is_served_in_ranges(http: httpx.Client, client: Client, job_id: str) -> None:
    path = _exported(client, job_id, 4)
    whole = http.get(path)
    etag, nbytes = whole.headers["etag"], len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes"

    part = http.get(path, headers={"Range": "bytes=100-", "If-Range": etag})
    assert (part.status_code, part.content) == (206, whole.content[100:])
    assert part.headers["content-range"] == f"bytes 100-{nbytes - 1}/{nbytes}"
    assert part.headers["etag"] == etag
    other = http.get(
        _exported(client, job_id, 6), headers={"Range": "bytes=100-", "If-Range": etag}
    )
    assert (other.status_code, len(other.content)) == (200, nbytes)
    assert other.headers["etag"] != etag

    whole = http.get(path, headers={"Range": "items=0-5"})
    assert (whole.status_code, len(whole.content)) == (200, nbytes), "a unit that is not known"
    for wrong in (f"bytes={nbytes}-", "bytes=x"):
        refused = http.get(path, headers={"Range": wrong})
        assert (refused.status_code, refused.json()["code"]) == (416, "range_not_satisfiable")
        assert refused.headers["content-range"] == f"bytes */{nbytes}"


@pytest.mark.seconds
def test_a_download_that_is_cut_resumes_with_the_same_bytes(
    server: LiveServer,
    http: httpx.Client,
    client: Client,
    job_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_answers, "DOWNLOAD_PIECE", 100)
    path = _exported(client, job_id, 4)
    whole = http.get(path).content
    target = tmp_path / "model.safetensors"
    written: list[int] = []
    with (
        closing(FlakyProxy(httpx.URL(server.address).port or 0)) as proxy,
        Client(proxy.endpoint) as proxied,
    ):
        cut = proxy.add("cut_download", times=1, after_bytes=1400)
        proxied.download(path.split("/")[-2], target, lambda done, _: written.append(done))
        assert (cut.used, len(proxy.requests)) == (1, 2)
    assert target.read_bytes() == whole
    assert written == sorted(set(written))  # no byte was sent twice


def test_an_export_with_names_that_the_model_has_not_is_refused(
    client: Client, job_id: str, tmp_path: Path
) -> None:
    with pytest.raises(Conflict, match="Hugging Face") as refused:
        client.export_checkpoint(job_id, 4, tmp_path / "model.safetensors", hugging_face=True)
    assert refused.value.code == "not_exportable"
    assert list(tmp_path.glob("*model*")) == []


@pytest.mark.seconds
def test_an_export_for_hugging_face_is_a_folder_of_the_client(
    server: LiveServer,
    http: httpx.Client,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = client.submit({**SPEC, "model": {"dim": 16, "layers": 1, "heads": 2}})
    server.run_job(job.id, end=False)
    training = JobSpec.model_validate(client.get(job.id).spec).training()
    report_saved(server, job.id, save_model(root_of(server, job.id), 4, training))
    eventually(lambda: len(client.checkpoints(job.id).items) == 1)
    made = tmp_path / "made"
    made.mkdir()
    folder = made / "model"
    progress: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="its tokens are the bytes of the text"):
        nbytes = client.export_checkpoint(
            job.id, 4, folder, hugging_face=True, on_bytes=lambda *counts: progress.append(counts)
        )
    assert progress[-1] == (nbytes, nbytes)
    assert list(made.iterdir()) == [folder]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads(files["config.json"])["hidden_size"] == 16
    assert "lm_head.weight" in load_file(folder / "model.safetensors")

    (operation,) = client.operations(job.id)
    answer = http.get(f"/api/v1/operations/{operation.id}/content")
    assert answer.headers["content-type"] == "application/x-tar"
    assert 'filename="step-00000004.tar"' in answer.headers["content-disposition"]
    assert len(answer.content) == nbytes

    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    arguments = ["checkpoint", "export", job.id, "--names", "hf", "-o"]
    assert run([*arguments, str(made / "again"), "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    again = {path.name: path.read_bytes() for path in (made / "again").iterdir()}
    assert again == files
    assert json.loads(out)["note"] in err.replace("\n", " ")
    assert "its tokens are the bytes of the text" in json.loads(out)["note"]
    assert run([*arguments, str(folder)]) == ExitCode.USAGE
    assert "no empty folder" in capsys.readouterr().err
    assert len(client.operations(job.id)) == 1, "one file serves all of them"


def test_a_storage_failure_is_reported_with_the_known_checkpoints(
    client: Client, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: LocalStorage) -> dict[str, int]:
        raise TransientStorageError(self.uri, "the disk is gone")

    monkeypatch.setattr(LocalStorage, "objects", fails)
    found = client.checkpoints(job_id)
    assert [(checkpoint.step, checkpoint.pinned) for checkpoint in found.items] == [
        (6, None),
        (4, None),
        (2, None),
    ]
    assert "the disk is gone" in str(found.storage_problem)
    with Client(client.address, retry_s=0.1) as hasty, pytest.raises(ServerError) as refused:
        hasty.remove_checkpoint(job_id, 6)
    assert refused.value.code == "storage_unavailable"


def test_an_interrupted_verification_does_not_judge_the_checkpoint(
    client: Client, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: LocalStorage, name: str) -> None:
        raise TransientStorageError(self.uri, f"{name} cannot be read")

    monkeypatch.setattr(LocalStorage, "open", fails)
    with pytest.raises(ServerError, match="cannot be read"):
        list(client.verify_checkpoint(job_id, 6))
    newest = client.checkpoints(job_id).items[0]
    assert (newest.bad, newest.verified_at) == (None, None)


def test_a_damaged_checkpoint_is_recorded_even_if_it_cannot_be_quarantined(
    server: LiveServer, client: Client, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(at: Storage, why: str) -> None:
        raise StorageDenied(at.uri, "may not be written")

    monkeypatch.setattr("holdfast_service.operations.runner.quarantine", denied)
    spoil(_folder(server, job_id, 6))
    with pytest.raises(ServerError, match="may not be written"):
        list(client.verify_checkpoint(job_id, 6))
    assert "__1_0.distcp" in str(client.checkpoints(job_id).items[0].bad)


def test_a_checkpoint_deleted_by_others_is_not_found(
    server: LiveServer, client: Client, job_id: str
) -> None:
    shutil.rmtree(_folder(server, job_id, 6))
    with pytest.raises(NotFound, match="was removed meanwhile"):
        client.pin_checkpoint(job_id, 6)
    with pytest.raises(NotFound, match="removed meanwhile"):
        list(client.verify_checkpoint(job_id, 6))
    assert not _folder(server, job_id, 6).exists()
    client.remove_checkpoint(job_id, 6)
    assert _steps(client, job_id) == [4, 2]


@pytest.mark.seconds
def test_the_command_line_lists_pins_exports_verifies_and_removes(
    server: LiveServer,
    client: Client,
    job_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["checkpoint", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    assert call("pin", job_id)[:2] == (ExitCode.OK, "step 6 is pinned\n")
    code, out, _ = call("ls", job_id)
    assert code == ExitCode.OK
    memory, *table = out.splitlines()
    assert memory == "in memory: nothing was saved in this attempt so far"
    assert [line.split()[0] for line in table] == ["STEP", "6", "4", "2"]
    assert "EVAL LOSS" not in table[0]
    assert "pinned" in table[1]
    assert "best" in table[2]
    code, _, err = call("rm", job_id, "--step", "6")
    assert code == ExitCode.CONFLICT
    assert "checkpoint_pinned" in err
    assert call("unpin", job_id, "--step", "6")[0] == ExitCode.OK
    target = tmp_path / "model.safetensors"
    assert call("export", job_id, "--format", "safetensors", "-o", str(target))[0] == ExitCode.OK
    assert np.array_equal(load_file(target)["norm"], global_state(6)["model.norm"])
    assert call("export", job_id, "-o", str(tmp_path / "no" / "x"))[0] == ExitCode.USAGE
    code, out, _ = call("verify", f"{job_id}/4", "--json")
    assert (code, json.loads(out)["state"]) == (ExitCode.OK, "SUCCEEDED")
    spoil(_folder(server, job_id, 6))
    code, _, err = call("verify", job_id)
    assert code == ExitCode.JOB_FAILED
    assert "checkpoint_bad" in err
    for arguments in (
        ("rm", job_id),
        ("rm", f"{job_id}/new"),
        ("rm", f"{job_id}/6", "--step", "4"),
    ):
        code, _, err = call(*arguments)
        assert code == ExitCode.USAGE
        assert "step_unclear" in err
    assert call("rm", f"{job_id}/6")[:2] == (ExitCode.OK, "")
    assert call("rm", job_id, "--step", "99")[0] == ExitCode.NOT_FOUND
    assert [location.step for location in list_checkpoints(root_of(server, job_id))] == [4, 2]


@pytest.mark.seconds
def test_a_checkpoint_outside_its_jobs_own_folder_is_never_removed(
    server: LiveServer, client: Client, job_id: str
) -> None:
    other = client.submit({**SPEC, "checkpoint": {"remote": BEST}})
    made = save_world(root_of(server, other.id), 8, 1, MESH, 8, {"loss": 1.0})
    report_saved(server, job_id, made)
    eventually(lambda: 8 in _steps(client, job_id))
    with pytest.raises(Conflict) as refused:
        client.remove_checkpoint(job_id, 8)
    assert refused.value.code == "checkpoint_elsewhere"
    assert _folder(server, other.id, 8).is_dir()
    assert 8 in _steps(client, job_id)
