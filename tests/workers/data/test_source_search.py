"""A pattern means what `glob` makes of it, and no search takes long."""

from __future__ import annotations

import glob
import itertools
import os
from pathlib import Path

import pytest

from holdfast_workers.data.source_search import may_exist


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
