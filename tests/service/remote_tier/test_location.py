"""The test of a job's remote storage before the job is accepted, and its named secrets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.service.databases import fast_settings
from tests.support.service.fake_cluster import FakeCluster
from tests.support.waiting import DEADLINE_S

from holdfast_service.errors import InvalidSpec
from holdfast_service.remote_tier import location
from holdfast_service.remote_tier.location import SecretUnusable, read_secret
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import StorageError
from holdfast_workers.protocol.processes import StorageOptions

SECRET = {"access_key_id": "AKIA", "secret_access_key": "very-secret-word", "bucket": "bucket"}


def _keep(
    settings: Settings, name: str, secret: dict[str, str], mode: int = 0o600, **bound: str
) -> Path:
    """Write a secret; `bound`: its `bucket` and `endpoint`."""
    settings.secrets_dir.mkdir(parents=True, exist_ok=True)
    path = settings.secrets_dir / f"{name}.json"
    path.write_text(json.dumps({**secret, **bound}))
    path.chmod(mode)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fast_settings(tmp_path, None, allow_local_storage=True)


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
    bucket = s3_server.new_bucket()
    _keep(settings, "ours", CREDENTIALS, bucket=bucket, endpoint=s3_server.endpoint)
    remote = {"uri": f"s3://{bucket}/a", "endpoint": s3_server.endpoint, "secret": "ours"}
    job, created = await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})
    assert created
    assert s3_server.objects(bucket) == []
    stored = job.model_dump_json()
    assert '"ours"' in stored
    assert CREDENTIALS["secret_access_key"] not in stored


@pytest.mark.seconds
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
        _keep(settings, name, secret, bucket=bucket, endpoint=s3_server.endpoint)
        uri = f"s3://{bucket}/x"
        path, why = await _fault(jobs, uri=uri, endpoint=s3_server.endpoint, secret=name)
        assert path == "checkpoint.remote.uri"
        assert "403" in why
        assert "must allow to list and read" in why
        assert secret["secret_access_key"] not in why
    _keep(settings, "writer", writer, bucket=bucket, endpoint=s3_server.endpoint)
    remote = {"uri": f"s3://{bucket}/x", "endpoint": s3_server.endpoint, "secret": "writer"}
    await jobs.submit({"name": "x", "checkpoint": {"remote": remote}})


async def test_a_missing_bucket_is_reported(
    jobs: JobService, settings: Settings, s3_server: S3Server
) -> None:
    bucket = "no-such-bucket-here"
    _keep(settings, "ours", CREDENTIALS, bucket=bucket, endpoint=s3_server.endpoint)
    path, why = await _fault(
        jobs, uri="s3://no-such-bucket-here/x", endpoint=s3_server.endpoint, secret="ours"
    )
    assert path == "checkpoint.remote.uri"
    assert "create the bucket" in why


@pytest.mark.slow
async def test_an_unreachable_or_silent_endpoint_is_reported_within_the_deadline(
    jobs: JobService, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "PROBE_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        unused = socket.create_server(("127.0.0.1", 0))
        ports = (unused.getsockname()[1], silent.getsockname()[1])
        unused.close()
        for port in ports:
            endpoint = f"http://127.0.0.1:{port}"
            _keep(settings, "ours", CREDENTIALS, bucket="bucket", endpoint=endpoint)
            async with asyncio.timeout(DEADLINE_S):
                path, why = await _fault(
                    jobs, uri="s3://bucket/x", endpoint=endpoint, secret="ours"
                )
            assert path == "checkpoint.remote.uri"
            assert "endpoint" in why


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
    path, _ = await _fault(jobs, uri="s3://bucket", endpoint="storage.example.com", secret="x")
    assert path == "checkpoint.remote.endpoint"


class Recorder:
    """A service at a local port that answers every request with `answer` and keeps what it got."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                with client, contextlib.suppress(OSError):
                    self.received += client.recv(65536)
                    client.sendall(self._answer)


XML = b"<Error><Code>inner-word</Code><Message>inner-word</Message></Error>"
REPLIES = {
    "an error": b"HTTP/1.1 400 inner-word\r\nContent-Length: %d\r\n\r\n" % len(XML) + XML,
    "no XML": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ninner-word",
    "no XML, denied": b"HTTP/1.1 403 No\r\nContent-Length: 10\r\n\r\ninner-word",
    "no HTTP": b"SSH-2.0-inner-word\r\n",
    "odd XML": b"HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n<a><b>inner-word</b></a>\n\n",
}


@pytest.mark.parametrize("name", REPLIES)
async def test_nothing_of_a_reply_is_repeated(
    jobs: JobService, settings: Settings, name: str
) -> None:
    service = Recorder(REPLIES[name])
    _keep(settings, "ours", CREDENTIALS, bucket="bucket", endpoint=service.endpoint)
    _, why = await _fault(jobs, uri="s3://bucket/x", endpoint=service.endpoint, secret="ours")
    service.close()
    assert service.received
    assert "inner-word" not in why


async def test_a_secret_is_sent_to_its_own_endpoint_and_bucket_only(
    jobs: JobService, settings: Settings
) -> None:
    thief = Recorder(REPLIES["an error"])
    _keep(settings, "ours", CREDENTIALS, bucket="ours", endpoint="https://storage.example.com")
    stolen = {"uri": "s3://ours/x", "endpoint": thief.endpoint}
    other = {"uri": "s3://other/x", "endpoint": "https://storage.example.com"}
    for remote in (stolen, other, {"uri": "s3://ours/x"}):
        path, why = await _fault(jobs, **remote, secret="ours")
        assert path == "checkpoint.remote.secret"
        assert "is for the bucket ours at https://storage.example.com" in why
    thief.close()
    assert thief.received == b""


async def test_each_source_needs_the_secret_of_its_own_bucket(
    jobs: JobService, settings: Settings
) -> None:
    url = "https://storage.example.com"
    _keep(settings, "ours", CREDENTIALS, bucket="ours", endpoint=url)
    bound = {"endpoint": url, "secret": "ours"}
    sources = [
        {"path": "s3://ours/a/*.parquet", **bound},
        {"path": "s3://other/a", **bound},
        {"path": "s3://ours/b", "secret": "ours"},
        {"path": "s3://ours/c", "secret": "absent"},
        {"path": "s3://[/d", **bound},
    ]
    for call in (jobs.validate, jobs.submit):
        with pytest.raises(InvalidSpec) as caught:
            await call({"name": "x", "data": {"sources": sources}})
        messages = {fault["path"]: fault["message"] for fault in caught.value.faults}
        secrets = [f"data.sources.{at}.secret" for at in (1, 2, 3)]
        assert set(messages) == {*secrets, "data.sources.4.path"}
        assert messages[secrets[0]] == (
            f"the secret 'ours' is for the bucket ours at {url}, not for other at {url}: change "
            "bucket or endpoint, or ask the operator for a secret for that bucket"
        )
        assert "not for ours at AWS" in messages[secrets[1]]
        assert "the server has no secret 'absent'" in messages[secrets[2]]
    assert await jobs.validate({"name": "x", "data": {"sources": sources[:1]}})


async def test_a_source_in_another_bucket_is_not_read_with_the_jobs_secret(
    jobs: JobService, settings: Settings, s3_server: S3Server
) -> None:
    bucket = s3_server.new_bucket()
    _keep(settings, "ours", CREDENTIALS, bucket=bucket, endpoint=s3_server.endpoint)
    remote = {"uri": f"s3://{bucket}/a", "endpoint": s3_server.endpoint, "secret": "ours"}
    source = f"s3://{s3_server.new_bucket()}/step-00000001.attempt-1"
    with pytest.raises(InvalidSpec) as caught:
        document = {"name": "x", "init_from": source, "checkpoint": {"remote": remote}}
        await jobs.submit(document)
    (fault,) = caught.value.faults
    assert fault["path"] == "init_from"
    assert f"is for the bucket {bucket}" in fault["message"]


async def test_the_servers_own_credentials_are_never_sent_to_an_endpoint_of_a_spec(
    jobs: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTHESERVER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    thief = Recorder(REPLIES["an error"])
    path, why = await _fault(jobs, uri="s3://bucket/x", endpoint=thief.endpoint)
    assert (path, "for AWS only" in why) == ("checkpoint.remote.secret", True)
    assert thief.received == b""
    options = StorageOptions(endpoint=thief.endpoint, attempts=1)
    with pytest.raises(StorageError):
        open_storage("s3://bucket/x", options).objects()
    thief.close()
    assert b"list-type=2" in thief.received
    assert b"AKIAOFTHESERVER" not in thief.received


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "127.1",
    ],
)
async def test_a_local_endpoint_is_refused_unless_it_is_allowed(
    store: Store, settings: Settings, host: str
) -> None:
    jobs = JobService(
        store, FakeCluster(), settings.model_copy(update={"allow_local_storage": False})
    )
    service = Recorder(REPLIES["an error"])
    endpoint = f"http://{host}:{urlsplit(service.endpoint).port}"
    _keep(settings, "ours", CREDENTIALS, bucket="bucket", endpoint=endpoint)
    path, why = await _fault(jobs, uri="s3://bucket/x", endpoint=endpoint, secret="ours")
    service.close()
    assert path == "checkpoint.remote.uri"
    assert "HOLDFAST_ALLOW_LOCAL_STORAGE" in why
    assert service.received == b""


async def test_a_refused_or_validated_spec_leaves_no_folder(
    jobs: JobService, tmp_path: Path
) -> None:
    remote = {"uri": str(tmp_path / "new" / "checkpoints")}
    document = {"name": "x", "checkpoint": {"remote": remote}, "init_from": {"source": "nothing"}}
    with pytest.raises(InvalidSpec):
        await jobs.submit(document)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    with pytest.raises(InvalidSpec):
        await jobs.submit(document)
    assert list(tmp_path.joinpath("new").iterdir()) == []
