"""The datasets of a trainer are added to its code, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.formats.code_archive import pack
from holdfast.integrations.ray_train.errors import FunctionUnusable
from holdfast.integrations.ray_train.shipped_datasets import (
    FILE_NAME,
    shipped_datasets,
    write_package,
)


def test_the_package_has_the_files_of_the_code_and_the_datasets_whatever_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, package = tmp_path / "code", tmp_path / "package"
    (code / "part").mkdir(parents=True)
    package.mkdir()
    for name in ("loop.py", "part/a.py", "part/secret.pickle"):
        (code / name).write_text(name)
    (code / ".gitignore").write_text("*.pickle\n")
    write_package(code, {"train": lambda: "rows"}, package)
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert found == {"loop.py", "part/a.py", FILE_NAME}
    assert FILE_NAME.encode() in pack(package)
    monkeypatch.chdir(package)
    assert shipped_datasets() == {"train": "rows"}


def test_what_is_neither_a_dataset_nor_a_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FunctionUnusable, match=r"datasets\['train'\] is a list: give a function"):
        write_package(None, {"train": [1]}, tmp_path)


def test_a_job_without_the_file_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FunctionUnusable, match=FILE_NAME):
        shipped_datasets()
