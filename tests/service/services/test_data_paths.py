"""Data that exists is found, data that does not is refused, and no search takes long."""

from __future__ import annotations

import asyncio
import glob
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.errors import InvalidSpec
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.services import data_paths
from holdfast_service.services.data_paths import DataPaths, may_exist
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import Settings


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("a.txt", "b/c.txt", "b/.hidden/d.md", "b/e/f/g.md", ".h/i.rs", "k[1].txt", "b/[]"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "gone").symlink_to("nowhere")
    return tmp_path


def test_a_pattern_means_what_glob_makes_of_it(tree: Path) -> None:
    parts = ("*", "**", "b", "*.txt", "*.md", ".*", "g.md", "[a-c]", "gone", "..")
    for count in (1, 2, 3):
        for chosen in itertools.product(parts, repeat=count):
            source = str(tree.joinpath(*chosen))
            matches = filter(os.path.exists, glob.iglob(source, recursive=True))  # noqa: PTH207
            assert may_exist(source, 1_000_000) == any(matches), source


def test_a_name_with_brackets_and_a_relative_path_are_found(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert may_exist(str(tree / "k[1].txt"))
    monkeypatch.chdir(tree)
    assert may_exist("b/*.txt") and may_exist("**/g.md") and not may_exist("b/*.rs")
    assert not may_exist("")


def test_a_search_ends_after_a_number_of_entries(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}").mkdir()
    (tmp_path / "0" / "loop").symlink_to(tmp_path)
    for source in ("*/x", "**/x", "*.txt", "**/*/**/x", "/".join(["**"] * 100 + ["x"])):
        assert may_exist(f"{tmp_path}/{source}", max_entries=200), "unknown is not refused"
    assert not may_exist(f"{tmp_path}/*.txt", max_entries=400)
    assert may_exist("/" + "*/" * 1_000 + "x", max_entries=2_000) in (True, False)


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
    paths = DataPaths(Settings(data_path_check_s=0.3))
    specs = [JobSpec.model_validate({"name": "x", "data": {"source": hanging}})] * 12
    faults = await asyncio.gather(*map(paths.find_fault, specs))
    refused = [fault for fault in faults if fault is not None]
    assert len(refused) == data_paths.MAX_SEARCHES
    assert all("did not answer in 0.3 s" in fault.message for fault in refused)
    # All threads hang: other paths are not searched, and not refused.
    other = JobSpec.model_validate({"name": "x", "data": {"source": str(tmp_path)}})
    assert await paths.find_fault(other) is None
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, lambda: 7) == 7
