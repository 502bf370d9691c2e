"""Data that exists is found, data that does not is refused, and no search takes long."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.service.fake_cluster import FakeCluster

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import PathAnswer
from holdfast_service.services import data_paths
from holdfast_service.services.data_paths import DataPaths
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings
from holdfast_workers.spec import DataSpec, SourceSpec


async def test_a_missing_path_is_refused_with_a_remedy(jobs: JobService, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for found in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        assert await jobs.validate({"name": "x", "data": {"source": str(found)}})
    for missing in (f"{tmp_path}/*.md", "/nowhere", "/tmp/" + "a" * 300, f"{tmp_path}/a.txt/b"):
        with pytest.raises(InvalidSpec) as refused:
            await jobs.validate({"name": "x", "data": {"source": missing}, "train": {"steps": 0}})
        steps, source = refused.value.faults
        assert (steps["path"], source["path"]) == ("train.steps", "data.source")
        assert "give the path or glob" in source["message"]
    assert await jobs.validate({"name": "x", "function": "a:b", "data": {"source": "/nowhere"}})


async def test_images_need_a_folder(jobs: JobService, tmp_path: Path) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "classes": 2}
    document = {"name": "x", "model": {"family": "vit", **sizes}}
    assert await jobs.validate({**document, "data": {"source": str(tmp_path)}})
    (tmp_path / "a.png").write_text("a")
    for source in (f"{tmp_path}/a.png", f"{tmp_path}/*", f"{tmp_path}/nowhere"):
        with pytest.raises(InvalidSpec) as refused:
            await jobs.validate({**document, "data": {"source": source}})
        (fault,) = refused.value.faults
        assert fault["path"] == "data.source"
        assert "is not a folder: give a folder that every node can read" in fault["message"]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A path below which every question hangs, as on a network file system that is away."""
    answered = threading.Event()
    ask = os.stat

    def stat(path: str | Path, *args: object, **kwargs: bool) -> os.stat_result:
        if str(path).startswith("/hanging"):
            answered.wait(60)
        return ask(path, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    yield "/hanging/data"
    answered.set()


async def test_a_file_system_that_hangs_delays_no_other_path(hanging: str, tmp_path: Path) -> None:
    paths = DataPaths(Settings(), FakeCluster(), deadline_s=0.3)
    specs = [JobSpec.model_validate({"name": "x", "data": {"source": hanging}})] * 12
    faults = await asyncio.gather(*map(paths.find_faults, specs))
    refused = [fault for found in faults for fault in found]
    assert len(refused) == data_paths.MAX_SEARCHES
    assert all("did not answer in 0.3 s" in fault.message for fault in refused)
    # All threads hang: other paths are not searched, and not refused.
    other = JobSpec.model_validate({"name": "x", "data": {"source": str(tmp_path)}})
    assert await paths.find_faults(other) == []
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, lambda: 7) == 7


async def test_with_a_cluster_of_its_own_a_node_is_asked_and_not_the_server(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    cluster = FakeCluster()
    cluster.paths = {"/nodes/a.txt"}
    paths = DataPaths(Settings(ray_address="10.0.0.1:6379", store_uri="s3://bucket"), cluster)

    async def fault(source: str) -> str | None:
        found = await paths.find_faults(
            JobSpec.model_validate({"name": "x", "data": {"source": source}})
        )
        return found[0].message if found else None

    assert await fault("/nodes/a.txt") is None
    assert "does not exist on the node 10.0.0.1" in str(await fault(f"{tmp_path}/a.txt"))
    cluster.unreachable = True
    assert await fault(f"{tmp_path}/a.txt") is None, "unknown is not refused"


async def test_each_missing_source_and_tokenizer_is_named_at_its_own_path(
    jobs: JobService, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    found = f"{tmp_path}/*.jsonl"
    sources = [{"path": path} for path in (found, f"{tmp_path}/*.md", "s3://lab/a", "relative")]
    data = {"sources": sources, "tokenizer": f"{tmp_path}/tokenizer.json"}
    with pytest.raises(InvalidSpec) as refused:
        await jobs.validate({"name": "x", "data": data})
    messages = {fault["path"]: fault["message"] for fault in refused.value.faults}
    assert set(messages) == {"data.tokenizer", "data.sources.1.path", "data.sources.3.path"}
    assert messages["data.tokenizer"] == (
        f"'{tmp_path}/tokenizer.json' does not exist: give the tokenizer.json, or the folder of a "
        "model with one, that every node can read"
    )
    assert messages["data.sources.1.path"] == (
        f"'{tmp_path}/*.md' does not exist: give a file, folder or glob that every node can read"
    )
    assert "is not an absolute path" in messages["data.sources.3.path"]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert await jobs.validate({"name": "x", "data": {**data, "sources": sources[:1]}})


async def test_files_of_sources_that_are_prepared_are_not_looked_for(
    jobs: JobService, settings: Settings
) -> None:
    source = SourceSpec(path="/nowhere")
    token_set = {
        "uri": f"{settings.data_dir.absolute()}/tokens/{'a' * 32}",
        "origin": DataSpec(tokenizer="/nowhere").origin_of(source),
        "digest": "a" * 32,
        "vocabulary": 300,
        "tokens": 9,
    }
    data = {"sources": [{"path": "/nowhere"}], "tokenizer": "/nowhere", "prepared": [token_set]}
    assert await jobs.validate({"name": "x", "data": data})
    elsewhere = {**data, "prepared": [{**token_set, "uri": f"/etc/{'a' * 32}"}]}
    with pytest.raises(InvalidSpec, match=r"is not a token set below .*/tokens, where those of"):
        await jobs.validate({"name": "x", "data": elsewhere})


async def test_few_nodes_are_asked_at_once_and_all_within_the_deadline() -> None:
    cluster = FakeCluster()
    asked = most = 0
    answers = asyncio.Event()

    async def look_for_path(source: str, folder: bool, timeout_s: float) -> PathAnswer:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        try:
            await answers.wait()
        finally:
            asked -= 1
        return PathAnswer("10.0.0.1", False)

    cluster.look_for_path = look_for_path  # type: ignore[method-assign]
    here = Settings(ray_address="10.0.0.1:6379", store_uri="s3://bucket")
    sources = [{"path": f"/data/{number}"} for number in range(20)]
    spec = JobSpec.model_validate({"name": "x", "data": {"sources": sources}})
    paths = DataPaths(here, cluster, deadline_s=0.3)
    assert await paths.find_faults(spec) == [], "unknown is not refused"
    assert most == data_paths.MAX_SEARCHES
    answers.set()
    found = await DataPaths(here, cluster, deadline_s=60).find_faults(spec)
    assert [fault.path for fault in found] == [f"data.sources.{n}.path" for n in range(20)]
    assert "does not exist on the node 10.0.0.1" in found[0].message


async def test_the_folder_of_a_published_model_must_exist(
    jobs: JobService, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    folder = tmp_path / "model"
    document = {
        "name": "x",
        "model": {"from": str(folder)},
        "data": {"sources": [{"path": f"{tmp_path}/a.jsonl"}]},
    }
    with pytest.raises(InvalidSpec) as refused:
        await jobs.validate(document)
    (fault,) = refused.value.faults
    assert (fault["path"], fault["message"]) == (
        "model.from",
        f"'{folder}' is not a folder: give the folder of a published model, with config.json and "
        "safetensors, that every node can read",
    )
    folder.mkdir()
    valid = await jobs.validate(document)
    assert valid.spec["data"]["tokenizer"] == str(folder)
    assert "dim" not in valid.spec["model"]
    assert valid.node_needs.shm_bytes is None


async def test_weights_elsewhere_than_the_server_puts_them_are_refused(
    jobs: JobService, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    weights = {"digest": "1" * 32, "manifest_bytes": 9, "nbytes": 9, "positions": 512}

    def document(uri: str) -> dict[str, Any]:
        model = {"from": str(tmp_path), "published": {**weights, "uri": uri}}
        return {"name": "x", "model": model, "data": {"sources": [{"path": str(tmp_path)}]}}

    root = f"{settings.data_dir.absolute()}/weights"
    assert await jobs.validate(document(f"{root}/{'1' * 32}"))
    with pytest.raises(InvalidSpec, match=r"is no set of weights below .*/weights, where those of"):
        await jobs.validate(document(f"/etc/{'1' * 32}"))
