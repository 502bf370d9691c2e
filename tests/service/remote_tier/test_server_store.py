"""The server's store: where the checkpoints of jobs go that name no place, now and later."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint.s3_server import CREDENTIALS, S3Server
from tests.support.service.databases import fast_settings
from tests.support.service.fake_cluster import FakeCluster

from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.remote_tier import location
from holdfast_service.remote_tier.server_store import (
    StoreUnusable,
    refuse_unusable,
    refuse_wrong_settings,
    with_store,
)
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_workers.checkpoint.local_files import LocalStorage

PLACE = {
    "store_uri": "s3://lab/jobs",
    "store_endpoint": "https://s3.example",
    "store_region": "eu-central-1",
    "store_secret": "lab",
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return fast_settings(tmp_path, None, allow_local_storage=True)


def spec_of(**remote: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "x", "checkpoint": {"remote": {"keep": 7, **remote}}})


def test_the_whole_place_is_written_into_a_spec_that_names_none(settings: Settings) -> None:
    remote = with_store(spec_of(), settings.model_copy(update=PLACE)).checkpoint.remote
    assert (remote.uri, remote.endpoint) == ("s3://lab/jobs", "https://s3.example")
    assert (remote.region, remote.secret, remote.keep) == ("eu-central-1", "lab", 7)


def test_a_spec_that_names_a_place_keeps_it(settings: Settings) -> None:
    spec = spec_of(uri="s3://own/place")
    assert with_store(spec, settings.model_copy(update=PLACE)) == spec
    assert with_store(spec_of(), settings) == spec_of(), "the data directory of the server"


async def test_a_later_change_of_the_setting_concerns_later_jobs_only(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    def service(store_uri: str | None) -> JobService:
        changed = settings.model_copy(update={"store_uri": store_uri})
        return JobService(store, FakeCluster(), changed)

    first = service(f"{tmp_path}/first")
    shown = await first.validate({"name": "x"})
    job, _ = await first.submit({"name": "x"})
    later = service(f"{tmp_path}/later")
    for view in (shown.spec, job.spec, (await later.get(job.id)).spec):
        assert view["checkpoint"]["remote"]["uri"] == f"{tmp_path}/first"
    other, _ = await later.submit({"name": "x"})
    assert other.spec["checkpoint"]["remote"]["uri"] == f"{tmp_path}/later"


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ({"ray_address": "10.0.0.1:6379"}, "--ray-address"),
        ({"store_uri": "relative/path"}, "--store-uri"),
        ({"store_uri": "s3://"}, "--store-uri"),
        ({"store_uri": "/" + "a" * 5_000}, "--store-uri"),
        ({"store_uri": "/shared", "store_region": "eu-central-1"}, "--store-region"),
        ({"store_secret": "lab"}, "--store-secret"),
        ({"store_uri": "s3://lab", "store_endpoint": "https://s3.example"}, "--store-secret"),
        ({"store_uri": "s3://lab", "store_region": "no region"}, "--store-region"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_by_their_names(
    settings: Settings, place: dict[str, str], option: str
) -> None:
    with pytest.raises(StoreUnusable) as refused:
        refuse_wrong_settings(settings.model_copy(update=place))
    assert str(refused.value).startswith(option)


def test_a_cluster_of_its_own_needs_a_store_and_is_told_which(settings: Settings) -> None:
    elsewhere = settings.model_copy(update={"ray_address": "10.0.0.1:6379"})
    with pytest.raises(StoreUnusable, match="--store-uri s3://bucket/prefix, or an absolute path"):
        refuse_wrong_settings(elsewhere)
    refuse_wrong_settings(elsewhere.model_copy(update=PLACE))
    refuse_wrong_settings(settings)


async def tested(settings: Settings, **place: str) -> None:
    await refuse_unusable(settings.model_copy(update=place), DaemonThreads(1, "probe"))


async def test_a_usable_store_is_left_unchanged(settings: Settings, s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    keep(settings, bucket, s3_server.endpoint)
    place = {"store_uri": f"s3://{bucket}/a", "store_endpoint": s3_server.endpoint}
    await tested(settings, **place, store_secret="lab")
    await tested(settings)
    assert s3_server.objects(bucket) == []


async def test_a_missing_secret_and_a_blocked_folder_end_the_server(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreUnusable, match="--store-secret: the server has no secret 'absent'"):
        await tested(settings, store_uri="s3://lab", store_secret="absent")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnusable, match="--store-uri: cannot store checkpoints"):
        await tested(settings, store_uri=f"{tmp_path}/file/store")

    def replaces(self: LocalStorage, name: str, content: bytes) -> None:
        with self.write(name) as file:
            file.write(content)

    monkeypatch.setattr(LocalStorage, "put_new", replaces)
    with pytest.raises(StoreUnusable, match="If-None-Match"):
        await tested(settings, store_uri=f"{tmp_path}/store")


async def test_a_store_that_is_away_is_reported_and_ends_no_server(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "PROBE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keep(settings, "bucket", endpoint)
        place = {"store_uri": "s3://bucket/x", "store_endpoint": endpoint, "store_secret": "lab"}
        await tested(settings, **place)
    printed = capsys.readouterr()
    assert "new jobs are refused" in printed.out + printed.err


def keep(settings: Settings, bucket: str, endpoint: str) -> None:
    """Write the secret `lab` for the bucket."""
    settings.secrets_dir.mkdir(parents=True, exist_ok=True)
    file = settings.secrets_dir / "lab.json"
    file.touch(0o600)
    file.write_text(json.dumps({**CREDENTIALS, "bucket": bucket, "endpoint": endpoint}))
