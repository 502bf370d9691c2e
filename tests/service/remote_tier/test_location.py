"""The test of a job's remote storage before the job is accepted, and its named secrets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.service.databases import fast_settings
from tests.support.service.fake_cluster import FakeCluster

from holdfast_service.errors import InvalidSpec
from holdfast_service.remote_tier.location import SecretUnusable, read_secret
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.checkpoint.local_files import LocalStorage

SECRET = {"access_key_id": "AKIA", "secret_access_key": "very-secret-word"}


def _keep(settings: Settings, name: str, secret: dict[str, str], mode: int = 0o600) -> Path:
    settings.secrets_dir.mkdir(parents=True, exist_ok=True)
    path = settings.secrets_dir / f"{name}.json"
    path.write_text(json.dumps(secret))
    path.chmod(mode)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fast_settings(tmp_path, None)


@pytest.fixture
def strict_server(s3_server: S3Server) -> Iterator[S3Server]:
    """An S3 server that checks signatures and permissions."""
    s3_server.check_credentials(True)
    yield s3_server
    s3_server.check_credentials(False)


async def _fault(jobs: JobService, **remote: str) -> tuple[str, str]:
    """Path and message of the only fault of such a job."""
    with pytest.raises(InvalidSpec) as caught:
        await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})
    (fault,) = caught.value.faults
    return fault["path"], fault["message"]


async def test_a_working_bucket_is_accepted_and_left_unchanged(
    jobs: JobService, settings: Settings, s3_server: S3Server
) -> None:
    _keep(settings, "ours", CREDENTIALS)
    bucket = s3_server.new_bucket()
    remote = {"uri": f"s3://{bucket}/a", "endpoint": s3_server.endpoint, "secret": "ours"}
    job, created = await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})
    assert created
    assert s3_server.objects(bucket) == []
    stored = job.model_dump_json()
    assert '"ours"' in stored
    assert CREDENTIALS["secret_access_key"] not in stored


async def test_wrong_credentials_are_reported_before_the_job_is_accepted(
    jobs: JobService, settings: Settings, s3_server: S3Server, strict_server: S3Server
) -> None:
    bucket = "owned-by-somebody"
    reader = strict_server.new_user(bucket, ["s3:ListBucket", "s3:GetObject"])
    writer = strict_server.new_user(bucket, ["s3:*"])
    cases = {
        "unknown": {**writer, "access_key_id": "AKIAUNKNOWNUNKNOWN12"},
        "mistyped": {**writer, "secret_access_key": "something-else-altogether"},
        "reader": reader,
    }
    for name, secret in cases.items():
        _keep(settings, name, secret)
        uri = f"s3://{bucket}/x"
        path, why = await _fault(jobs, uri=uri, endpoint=s3_server.endpoint, secret=name)
        assert path == "checkpoint.remote.uri"
        assert "403" in why
        assert "must allow to list, read, write and delete" in why
        assert secret["secret_access_key"] not in why
    _keep(settings, "writer", writer)
    remote = {"uri": f"s3://{bucket}/x", "endpoint": s3_server.endpoint, "secret": "writer"}
    await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})


async def test_a_missing_bucket_is_reported(
    jobs: JobService, settings: Settings, s3_server: S3Server
) -> None:
    _keep(settings, "ours", CREDENTIALS)
    path, why = await _fault(
        jobs, uri="s3://no-such-bucket-here/x", endpoint=s3_server.endpoint, secret="ours"
    )
    assert path == "checkpoint.remote.uri"
    assert "create the bucket" in why


async def test_an_unreachable_or_silent_endpoint_is_reported_within_the_deadline(
    jobs: JobService, store: Store, settings: Settings
) -> None:
    _keep(settings, "ours", CREDENTIALS)
    hasty = JobService(store, FakeCluster(), settings.model_copy(update={"storage_probe_s": 2.0}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        unused = socket.create_server(("127.0.0.1", 0))
        ports = (unused.getsockname()[1], silent.getsockname()[1])
        unused.close()
        for port in ports:
            began = time.monotonic()
            path, why = await _fault(
                hasty, uri="s3://bucket/x", endpoint=f"http://127.0.0.1:{port}", secret="ours"
            )
            assert path == "checkpoint.remote.uri"
            assert "endpoint" in why
            assert time.monotonic() - began < 4.0


async def test_a_folder_that_cannot_be_created_is_reported(
    jobs: JobService, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    path, why = await _fault(jobs, uri=f"{tmp_path}/file/checkpoints")
    assert path == "checkpoint.remote.uri"
    assert str(tmp_path / "file") in why


async def test_a_storage_without_conditional_writes_is_reported(
    jobs: JobService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaces(self: LocalStorage, name: str, content: bytes) -> None:
        with self.write(name) as file:
            file.write(content)

    monkeypatch.setattr(LocalStorage, "put_new", replaces)
    path, why = await _fault(jobs, uri=f"{tmp_path}/checkpoints")
    assert path == "checkpoint.remote.uri"
    assert "If-None-Match" in why
    assert list((tmp_path / "checkpoints").glob(".*")) == []


async def test_a_storage_whose_first_answer_is_lost_is_accepted(
    jobs: JobService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_new = LocalStorage.put_new

    def again(self: LocalStorage, name: str, content: bytes) -> None:
        put_new(self, name, content)
        put_new(self, name, content)

    monkeypatch.setattr(LocalStorage, "put_new", again)
    remote = {"uri": f"{tmp_path}/checkpoints"}
    assert (await jobs.submit({"name": "x", "checkpoint": {"remote": remote}}))[1]


async def test_a_path_that_the_server_cannot_see_is_not_probed(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    blind = settings.model_copy(update={"check_data_paths": False})
    jobs = JobService(store, FakeCluster(), blind)
    (tmp_path / "file").write_text("in the way")
    remote = {"uri": f"{tmp_path}/file/checkpoints"}
    await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_readable_by_other_users_is_refused(settings: Settings, mode: int) -> None:
    _keep(settings, "open", SECRET, mode)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        read_secret(settings.secrets_dir, "open")


def test_an_invalid_secret_is_refused_without_being_quoted(settings: Settings) -> None:
    path = _keep(settings, "odd", {**SECRET, "password": "very-secret-word"})
    for content in (path.read_text(), '{"access_key_id": "very-secret-word', '"very-secret-word"'):
        path.write_text(content)
        with pytest.raises(SecretUnusable) as caught:
            read_secret(settings.secrets_dir, "odd")
        assert "very-secret-word" not in str(caught.value)
        assert caught.value.__cause__ is None


async def test_a_missing_secret_is_reported_at_its_own_path(jobs: JobService) -> None:
    for name in ("absent", "../job-secrets"):
        path, why = await _fault(jobs, uri="s3://bucket/x", secret=name)
        assert path == "checkpoint.remote.secret"
        assert name in why


async def test_fields_of_a_bucket_need_a_bucket(jobs: JobService) -> None:
    for name in ("endpoint", "region", "secret"):
        path, why = await _fault(jobs, uri="/tmp/x", **{name: "http://somewhere"})
        assert path == f"checkpoint.remote.{name}"
        assert "s3://" in why
    path, _ = await _fault(jobs, uri="s3://bucket", endpoint="storage.example.com")
    assert path == "checkpoint.remote.endpoint"
