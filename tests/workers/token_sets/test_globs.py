"""Globs match the same names in a folder and in a bucket."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from holdfast_workers.token_sets.globs import literal_prefix, matching_files, pattern_of

NAMES = [
    *("a.txt", "b.txt", ".hidden.txt", "ab.txt", "a*b.txt", "x[1].txt", "x1.txt", "^.txt"),
    *("d/a.txt", "d/e/a.txt", "d/e/f/a.txt", "d/.git/a.txt", "d/e.txt/a.txt", "d/new\nline.txt"),
    *("dd/a.txt", "d/-.txt", "d/a.b.txt", "é/☃.txt", "d/e/z.bin"),
]
GLOBS = [
    *("*", "*.txt", "?.txt", "[ab].txt", "[!a]*.txt", "[^].txt", "a[*]b.txt", "x[[]1].txt", ".*"),
    *("**", "**/*.txt", "d/**", "d/**/a.txt", "**/e/**/a.txt", "*/a.txt", "d*/*.txt", "d/[!a].txt"),
    *("**/.git/*", "d/**/**/a.txt", "[a-b]*", "x[1", "d/?e?.txt", "*/**/*", "é/[☃].*", "[]a]*"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_matches_as_in_pythons_library(folder: Path, pattern: str) -> None:
    expected = {
        name
        for name in glob.glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207
        if (folder / name).is_file()
    }
    regular = pattern_of(pattern)
    assert {name for name in NAMES if regular.fullmatch(name)} == expected
    assert all(name.startswith(literal_prefix(pattern)) for name in expected)
    if glob.has_magic(pattern):
        found = {os.fspath(path.relative_to(folder)) for path in matching_files(folder / pattern)}
        assert found == expected
