"""Each job's programs start in a copy of the code of their own, which restarts find again."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast_workers.programs.working_folder import KEPT_S, working_folder


def code_in(folder: Path) -> str:
    (folder / "code" / "package").mkdir(parents=True)
    (folder / "code" / "package" / "train.py").write_text("x = 1")
    (folder / "code" / "link").symlink_to("package/train.py")
    return str(folder / "code")


def test_jobs_with_the_same_code_do_not_share_files(tmp_path: Path) -> None:
    code, cache = code_in(tmp_path), str(tmp_path / "cache")
    first, second = (Path(working_folder(code, cache, job)) for job in ("a", "b"))
    (first / "ckpt.pt").write_text("of a")
    assert (second / "package" / "train.py").read_text() == "x = 1"
    assert (second / "link").is_symlink()
    assert not (second / "ckpt.pt").exists()
    assert not (Path(code) / "ckpt.pt").exists()


def test_a_restart_finds_what_the_program_has_written(tmp_path: Path) -> None:
    code, cache = code_in(tmp_path), str(tmp_path / "cache")
    (Path(working_folder(code, cache, "a")) / "ckpt.pt").write_text("step 7")
    assert (Path(working_folder(code, cache, "a")) / "ckpt.pt").read_text() == "step 7"


def test_ranks_that_start_at_once_get_one_whole_folder(tmp_path: Path) -> None:
    code, cache = code_in(tmp_path), str(tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: working_folder(code, cache, "a"), range(16)))
    assert len(found) == 1
    assert [path.name for path in (tmp_path / "cache" / "programs").iterdir()] == ["a"]
    assert (Path(found.pop()) / "package" / "train.py").exists()


def test_folders_that_were_long_unused_are_removed(tmp_path: Path) -> None:
    code, cache = code_in(tmp_path), str(tmp_path / "cache")
    old = Path(cache) / "programs" / "old"
    old.mkdir(parents=True)
    used = working_folder(code, cache, "used")
    for folder in (old, used):
        os.utime(folder, (0, time.time() - KEPT_S - 1))
    assert Path(working_folder(code, cache, "new")).exists()
    assert not old.exists()
    assert Path(used).exists()
