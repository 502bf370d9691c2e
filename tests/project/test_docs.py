"""The documents name only what exists, and all that can be set."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import build
from holdfast_service.crash_points import Point
from holdfast_service.job_model.lifecycle import TRANSITIONS
from holdfast_service.policy.causes import Cause
from holdfast_service.settings import Settings
from holdfast_workers.fault_injection.kinds import PHASES, FaultKind

ROOT = Path(__file__).parents[2]
PACKAGES = ("api/holdfast", "service/holdfast_service", "workers/holdfast_workers")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULE = re.compile(r"`([\w/]+\.py)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
ROOM = re.compile(r"^### `(\w+)`.*?(?=^##)", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?:\$ |source <\()?(holdfast [^#\n]*?)(?:\)|\s+[|<].*)?(?:\s+#.*)?$", re.MULTILINE
)
GENERATED = "reference/"
"""Pages that the site makes from the code; tests/project/test_site.py looks for them."""
ENTRANCES = ("__init__.py", "__main__.py")


def sources() -> list[str]:
    """Every Python file of the packages and the tests, as a path that begins with a slash."""
    folders = [*(ROOT / package for package in PACKAGES), ROOT / "tests", ROOT / "benchmarks"]
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_and_page_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    known = sources()
    modules = MODULE.findall(text)
    assert not [name for name in modules if not any(one.endswith(f"/{name}") for one in known)]
    links = [link for link in LINK.findall(text) if not link.startswith(GENERATED)]
    assert not [link for link in links if not (document.parent / link).exists()]
    if document.name == "architecture.md":
        assert len(set(modules)) > 100  # the map is there at all


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_names_every_module_in_its_room(package: str) -> None:
    folder, text = ROOT / package, (ROOT / "docs/architecture.md").read_text()
    (room,) = [one[0] for one in ROOM.finditer(text) if one[1] == folder.name]
    named = {name.removeprefix(f"{folder.name}/") for name in MODULE.findall(room)}
    found = [path.relative_to(folder) for path in folder.rglob("*.py")]
    there = {
        str(path) for path in found if path.name not in ENTRANCES and "migrations" not in path.parts
    }
    assert named == there


def commands(document: Path) -> list[str]:
    """The command lines that a document shows, with whatever they say is optional."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in COMMAND.findall(block)]
    return [line.replace("[", "").replace("]", "") for line in lines]


SHOWN = {line: document.name for document in DOCUMENTS for line in commands(document)}


@pytest.mark.parametrize("line", SHOWN)
def test_every_command_that_is_shown_is_understood(line: str) -> None:
    build().parse_args(shlex.split(line)[1:], exit_on_error=False)


def test_the_commands_that_are_shown_are_found() -> None:
    for line in ("holdfast ls", "holdfast submit - --dry-run", "holdfast completion bash"):
        assert line in SHOWN
    assert len(SHOWN) > 50


def test_every_setting_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    settings = [f"HOLDFAST_{name.upper()}" for name in Settings.model_fields]
    assert not [name for name in settings if f"| `{name}`" not in text]


def test_every_exit_code_cause_and_transition_is_told() -> None:
    operations = (ROOT / "docs/operations.md").read_text()
    assert not [code for code in ExitCode if f"| {code.value} |" not in operations]
    policy = (ROOT / "docs/recovery-policy.md").read_text()
    assert not [cause for cause in Cause if f"| `{cause.value}` |" not in policy]
    assert not [kind for kind in FaultKind if f"| `{kind}` |" not in operations]
    assert not [phase for phase in PHASES if f"`{phase}`" not in operations]
    architecture = (ROOT / "docs/architecture.md").read_text()
    assert not [state for state in TRANSITIONS if f"`{state.value}`" not in architecture]
    assert len(Point) == 13  # "thirteen points between transition and effect"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_machine(document: Path) -> None:
    assert not re.findall(r"/(?:home|root|work|Users)/\S*", document.read_text())
