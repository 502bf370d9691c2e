"""The suites: what a change reaches, equal parts, sums of durations, the table of real tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.suites import durations
from tests.support.suites.machine import machine
from tests.support.suites.reach import Repository, distances, used_files
from tests.support.suites.selection import affected_files, modules_of_part

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MARKS = ("cell", "story")
FILES = {
    "api/holdfast/__init__.py": "",
    "api/holdfast/__main__.py": "from holdfast.cli import main",
    "api/holdfast/cli/__init__.py": "",
    "api/holdfast/cli/main.py": "COMMANDS = ['cli.jobs:ls']",
    "api/holdfast/cli/jobs.py": "def ls(): ...",
    "workers/holdfast_workers/__init__.py": "",
    "workers/holdfast_workers/zygote.py": "",
    "workers/holdfast_workers/agent.py": "COMMAND = ['-m', 'holdfast_workers.zygote']",
    "workers/holdfast_workers/spec.py": "TRAINER = 'holdfast.cli.jobs:ls'",
    "tests/conftest.py": "def folder(): ...",
    "tests/api/conftest.py": "from holdfast.cli import main\ndef server(folder): ...",
    "tests/api/test_server.py": "def test_it(server): ...",
    "tests/api/test_command.py": "COMMAND = ('python', '-m', 'holdfast', 'ls')",
    "tests/api/test_page.py": "PAGE = ROOT / 'docs' / 'index.md'",
    "tests/workers/test_agent.py": "from holdfast_workers import agent",
    "tests/workers/test_code.py": "CODE = 'import holdfast_workers.spec as s'",
    "tests/workers/test_alone.py": "def test_it(): 'No use of holdfast_workers.zygote.'",
    "docs/index.md": "",
}
IMPORTS = {"api/holdfast/__main__.py": "api/holdfast/cli/main.py"}
"""Those of the packages, which grimp finds in installed packages only."""


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("workers/holdfast_workers/zygote.py", {"workers/test_agent"}),  # by a command's words
        ("workers/holdfast_workers/__init__.py", {"workers/test_agent", "workers/test_code"}),
        ("workers/holdfast_workers/spec.py", {"workers/test_code"}),  # by code in a string
        # by a fixture of its conftest.py, and by -m
        ("api/holdfast/cli/main.py", {"api/test_server", "api/test_command"}),
        ("api/holdfast/cli/jobs.py", {"api/test_server", "api/test_command"}),  # by a name of it
        ("docs/index.md", {"api/test_page"}),
        ("tests/workers/test_alone.py", {"workers/test_alone"}),
    ],
)
def test_a_change_reaches_the_tests_that_use_it(
    tmp_path: Path, changed: str, reached: set[str]
) -> None:
    for path, source in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    uses = used_files(Repository(tmp_path, frozenset(FILES)), packages=())
    for user, used in IMPORTS.items():
        uses[user].add(used)
    found = distances(uses, [changed])
    assert found[changed] == 0
    tests = {path for path in found if Path(path).name.startswith("test_")}
    assert tests == {f"tests/{name}.py" for name in reached}


@pytest.mark.slow
def test_a_change_of_the_zygote_reaches_what_kills_ranks_and_not_what_formats_bytes() -> None:
    files = frozenset(
        path.relative_to(ROOT).as_posix()
        for folder in ("api/holdfast", "service", "workers", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    zygote = "workers/holdfast_workers/child_programs/zygote.py"
    found = distances(used_files(Repository(ROOT, files)), [zygote])
    assert {"tests/chaos/test_worker_faults.py", "tests/end_to_end/test_product.py"} <= found.keys()
    assert "tests/workers/test_byte_sizes.py" not in found


def test_an_unknown_commit_is_refused() -> None:
    with pytest.raises(Exception, match="git"):
        affected_files(ROOT, "no-such-commit")


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 100), max_size=30), st.integers(1, 5))
def test_every_module_is_in_exactly_one_part(weights: dict[str, int], parts: int) -> None:
    dealt = [modules_of_part(weights, part, parts) for part in range(1, parts + 1)]
    assert Counter(module for own in dealt for module in own) == Counter(weights.keys())
    loads = [sum(weights[module] for module in own) for own in dealt]
    assert max(loads) - min(loads) <= max(weights.values(), default=0)


def test_durations_are_summed_by_folder_mark_and_fixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "junit.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.api.rest.test_jobs" name="test_a" time="2.5"><properties>
        <property name="marks" value="web slow"/><property name="fixture server" value="1.500"/>
        <property name="processor_s" value="3.00"/></properties></testcase>
        <testcase classname="tests.api.rest.test_jobs" name="test_b" time="0.5"/>
        </testsuite></testsuites>"""
    )
    durations.main([str(tmp_path / "junit.xml")])
    shown = capsys.readouterr().out
    assert "2 tests, 3 s; 1 over 1 s, 2 s" in shown
    for line in (
        "3.0      2  api.rest",
        "2.5      1  web",
        "2.5      1  slow",
        "1.5      1  server",
    ):
        assert line in shown


def test_the_machine_is_described() -> None:
    assert re.search(r"\d+ cores, \d+ GiB, load .*, a loop takes \d+\.\d+ s", machine())


def test_the_table_of_contributing_has_the_marked_tests_and_each_cell_once() -> None:
    text = CONTRIBUTING.read_text()
    rows = re.findall(r"^\| (P\d) \| ([\w ]+) \|.*\| `(tests/\S+::\w+)` \|$", text, re.MULTILINE)
    stories = re.findall(r"^\| ([\w ]+) \| `(tests/\S+::\w+)` \|$", text, re.MULTILINE)
    documented = {(f"{promise} {process}", test) for promise, process, test in rows}
    documented |= set(stories)
    assert documented == set(_marked_tests())
    assert len(rows) > 30 and len(stories) > 10
    cells = Counter(cell for cell, _ in documented)
    assert [cell for cell, count in cells.items() if count > 1] == []


def _marked_tests() -> Iterator[tuple[str, str]]:
    """(the words of a mark, the test that has it)."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if any(f"mark.{mark}(" in text for mark in MARKS):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                    yield from ((words, test) for words in _marks_of(node))


def _marks_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """E.g. "P2 rank" of `@pytest.mark.cell("P2", "rank")`, in a parameter's marks too."""
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            match node:
                case ast.Call(func=ast.Attribute(attr=name), args=words) if name in MARKS:
                    yield " ".join(ast.literal_eval(word) for word in words)
