"""A training function is shipped with the folder from which ranks can import it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import ray_functions

from holdfast.integrations.ray_train.errors import FunctionUnusable
from holdfast.integrations.ray_train.shipped_function import shipped

ROOT = Path(__file__).parents[4]
PROGRAM = """
import json
from holdfast.integrations.ray_train.shipped_function import shipped

def train(config): ...

if __name__ == "__main__":
    found = shipped(train)
    print(json.dumps([found.reference, str(found.folder)]))
"""


def outer() -> Any:
    def inner() -> None: ...

    return inner


class CalledObject:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


def run(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_function_of_a_package_is_shipped_from_the_folder_above_it() -> None:
    found = shipped(ray_functions.train)
    assert found.reference == "tests.support.programs.ray_functions:train"
    assert found.folder == ROOT


def test_a_function_of_an_installed_package_is_not_shipped() -> None:
    assert shipped(pytest.importorskip).folder is None


def test_a_function_of_the_program_itself_is_shipped_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "program.py")
    assert json.loads(done.stdout) == ["program:train", str(tmp_path)], done.stderr


def test_a_function_of_a_module_that_is_run_is_shipped_by_the_modules_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "-m", "package.program")
    assert json.loads(done.stdout) == ["package.program:train", str(tmp_path)], done.stderr


@pytest.mark.parametrize(
    ("arguments", "text", "remedy"),
    [
        (("-",), PROGRAM, "put it into a module"),
        (("two-words.py",), "", "rename it"),
    ],
)
def test_a_program_that_cannot_be_imported_is_refused(
    tmp_path: Path, arguments: tuple[str], text: str, remedy: str
) -> None:
    (tmp_path / "two-words.py").write_text(PROGRAM)
    done = run(tmp_path, *arguments, text=text)
    assert "FunctionUnusable" in done.stderr and remedy in done.stderr


@pytest.mark.parametrize(
    "function",
    [outer(), lambda: None, CalledObject(), CalledObject().method, functools.partial(outer), print],
)
def test_what_ranks_cannot_import_is_refused(function: Any) -> None:
    with pytest.raises(FunctionUnusable, match="top of a module"):
        shipped(function)
