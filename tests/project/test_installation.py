"""Without extras, the client and its commands work; each extra declares what its part imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.base_installation import ROOT, base_modules, project

from holdfast.cli.exit_codes import ExitCode
from holdfast_service.extras import DISTRIBUTION, SERVER_PACKAGES, Extra

SOURCES = {
    "workers/holdfast_workers": (Extra.WORKERS,),
    "service/holdfast_service": (Extra.WORKERS, Extra.SERVER),
    "api/holdfast": (Extra.WORKERS, Extra.SERVER, Extra.TELEMETRY),
}
PART_OF = {"pydantic_core": "pydantic", "starlette": "fastapi"}
"""Modules that are imported from a package that another one is made of."""
BROUGHT = ("accelerate", "transformers")
"""Frameworks of the program that imports a plug-in."""
OWN = ("holdfast", "holdfast_service", "holdfast_workers")
OLD_NAME = re.compile(r"pip install ['\"]?holdfast(?!-)|holdfast\[")

BASE_ONLY = """
import importlib, pkgutil, sys

present = {*sys.stdlib_module_names, *sys.argv.pop(1).split()}


class BaseOnly:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in present and not top.startswith("_sysconfigdata"):
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(BaseOnly, sys.meta_path)
"""
LOAD = """
import holdfast
import holdfast.cli.main

for name in holdfast.__all__:
    getattr(holdfast, name)
for room in ("cli", "client", "formats"):
    package = importlib.import_module("holdfast." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for command in holdfast.cli.main.COMMANDS:
    importlib.import_module("holdfast." + command.where.partition(":")[0])
"""
RUN = """
from holdfast.cli.main import run

sys.exit(run(sys.argv[1:]))
"""


def in_base_installation(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program, in an interpreter that finds no module of an extra."""
    present = " ".join([*base_modules(), *OWN])
    return subprocess.run(
        [sys.executable, "-c", BASE_ONLY + program, present, *arguments],
        capture_output=True,
        text=True,
    )


def test_client_and_commands_load_without_extras() -> None:
    done = in_base_installation(LOAD)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVER_PACKAGES)
def test_the_base_installation_lacks_the_packages_of_the_server(name: str) -> None:
    assert in_base_installation(f"import {name}").returncode == 1


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_command_that_needs_the_server_says_what_to_install(command: str) -> None:
    done = in_base_installation(RUN, command)
    assert done.returncode == ExitCode.USAGE, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error (missing_extra): ")
    assert f"pip install '{DISTRIBUTION}[server]'" in line


def test_doctor_accepts_an_installation_of_the_client_alone(tmp_path: Path) -> None:
    done = in_base_installation(RUN, "doctor", "--json", "--data-dir", str(tmp_path))
    results = {entry["what"]: entry for entry in json.loads(done.stdout)}
    assert results["packages"]["grade"] == "odd"
    assert f"pip install '{DISTRIBUTION}[server]'" in results["packages"]["advice"]


@pytest.mark.parametrize("source", SOURCES)
def test_imported_packages_are_declared(source: str) -> None:
    extras = project()["optional-dependencies"]
    requirements = list(project()["dependencies"])
    for extra in SOURCES[source]:
        requirements += extras[extra]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    installed = packages_distributions()
    undeclared = {}
    for path in (ROOT / source).rglob("*.py"):
        for module in imported_by(path):
            distributions = installed.get(PART_OF.get(module, module), ())
            found = {canonicalize_name(name) for name in distributions}
            if module not in BROUGHT and not declared & found:
                undeclared[module] = str(path.relative_to(ROOT))
    assert undeclared == {}


def imported_by(path: Path) -> Iterator[str]:
    """The top-level modules of other projects that the file imports, at any place."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for top in {name.partition(".")[0] for name in names}:
            if top not in sys.stdlib_module_names and top not in OWN:
                yield top


def test_the_last_line_of_the_setup_says_what_to_type() -> None:
    for goal, is_end in (("setup", True), ("lint", False)):
        command = ["make", "--dry-run", "--no-print-directory", goal]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert ("holdfast demo" in lines.splitlines()[-1]) is is_end


def test_extras_have_their_names() -> None:
    assert project()["name"] == DISTRIBUTION
    assert {*project()["optional-dependencies"]} == {*Extra, "dev"}


def test_no_page_and_no_message_names_the_distribution_of_another_project() -> None:
    pages = [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in (*pages, *code)
        if (match := OLD_NAME.search(path.read_text()))
    }
    assert found == {}
