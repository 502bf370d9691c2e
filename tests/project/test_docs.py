"""The documents name only what exists, name everything that can be set, and stay readable."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import build
from holdfast_service.crash_points import CrashPoint
from holdfast_service.job_model.lifecycle import TRANSITIONS
from holdfast_service.policy.causes import Cause
from holdfast_workers.fault_injection.kinds import PHASES

ROOT = Path(__file__).parents[2]
PACKAGES = ("api/holdfast", "service/holdfast_service", "workers/holdfast_workers")
ARCHITECTURE = ROOT / "docs/architecture.md"
SHORT_PAGES = (ARCHITECTURE, *sorted((ROOT / "docs/operations").glob("*.md")))
PAGE_WORDS = 2000
PARAGRAPH_WORDS = 80
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / part / "README.md" for part in ("api", "service", "workers")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
MODULE = re.compile(r"`([\w/]+\.py)`")
DASHBOARD_FILE = re.compile(r"`([\w/.]+\.(?:tsx?|js|css))`")
INLINE_CODE = re.compile(r"`([^`\n]+)`")
IDENTIFIER = re.compile(r"\b(?:[A-Za-z]*_\w+|[A-Z]\w+)\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
ROOM = re.compile(r"^### `(\w+)`.*?(?=^##)", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s")
COMMAND = re.compile(
    r"^(?:\$ |source <\(|make setup && )?(?:\.venv/bin/)?(holdfast [^#\n]*?)"
    r"(?:\)|\s+[|<].*)?(?:\s+#.*)?$",
    re.MULTILINE,
)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


EVERY_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@cache
def python_files() -> tuple[str, ...]:
    """Every Python file of the packages and the tests, as a path that begins with a slash."""
    folders = [
        *(ROOT / package for package in PACKAGES),
        *(ROOT / name for name in ("tests", "benchmarks", "examples")),
    ]
    found = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")]
    return (*found, "/api/dashboard/build.py", "/api/generate_client.py")


@cache
def dashboard_files() -> tuple[str, ...]:
    folders = [ROOT / "api/dashboard" / name for name in ("src", "public", "scripts")]
    return tuple(f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*"))


@cache
def words_of_the_code() -> frozenset[str]:
    files = [name for name in (*python_files(), *dashboard_files()) if not name.endswith(".gz")]
    texts = ((ROOT / name.lstrip("/")).read_text() for name in files)
    return frozenset(word for text in (*files, *texts) for word in re.findall(r"\w+", text))


def missing(named: list[str], known: tuple[str, ...]) -> list[str]:
    return [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


@EVERY_DOCUMENT
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    assert missing(MODULE.findall(text), python_files()) == []
    assert missing(DASHBOARD_FILE.findall(text), dashboard_files()) == []


@EVERY_DOCUMENT
def test_every_link_leads_to_a_page_and_a_heading(document: Path) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", document.read_text())):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        if anchor:
            headings = HEADING.findall(FENCED.sub("", target.read_text()))
            assert anchor in {anchor_of(heading) for heading in headings}, f"{path}#{anchor}"


def anchor_of(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_names_every_room_of_a_package(package: str) -> None:
    folder = ROOT / package
    sections = {found[1]: found[0] for found in ROOM.finditer(ARCHITECTURE.read_text())}
    rooms = [path.parent.relative_to(folder) for path in folder.rglob("*/__init__.py")]
    assert rooms
    assert [room for room in rooms if f"`{room}/`" not in sections[folder.name]] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_of_a_package_names_its_rooms(package: str) -> None:
    folder = ROOT / package
    text = (folder.parent / "README.md").read_text()
    rooms = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_a_page_is_read_in_five_minutes() -> None:
    words = {name_of(page): len(page.read_text().split()) for page in SHORT_PAGES}
    assert not [name for name, number in words.items() if number > PAGE_WORDS], words


@EVERY_DOCUMENT
def test_no_paragraph_is_long(document: Path) -> None:
    long = [
        text for text in paragraphs(document.read_text()) if len(text.split()) > PARAGRAPH_WORDS
    ]
    assert long == []


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items, each by itself; without code blocks, headings and tables."""
    lines: list[str] = []
    for line in [*FENCED.sub("", text).splitlines(), ""]:
        apart = not line.strip() or line.lstrip().startswith(("|", "#", "<!--"))
        if lines and (apart or LIST_ITEM.match(line)):
            yield " ".join(lines)
            lines = []
        if not apart:
            lines.append(line.strip())


def test_paragraphs_and_list_items_count_by_themselves() -> None:
    text = "# A\nb c\nd\n\n- e\n  f\n- g\n\n| t | u |\n\n```sh\nx\n```\n1. h\n"
    assert list(paragraphs(text)) == ["b c d", "- e f", "- g", "1. h"]


def test_contributing_names_only_what_the_code_has() -> None:
    text = FENCED.sub("", (ROOT / "CONTRIBUTING.md").read_text())
    codes = [code for code in INLINE_CODE.findall(text) if "/" not in code and "<" not in code]
    named = {name for code in codes for name in IDENTIFIER.findall(code)}
    parts = {"ray_", "_total", "_seconds", "_bytes", "_s", "test_prometheus_"}
    assert len(named) > 60
    assert sorted(named - parts - words_of_the_code()) == []


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


def test_pages_have_the_tables_of_the_current_code() -> None:
    hook = runpy.run_path(str(ROOT / "docs/.hooks/reference.py"))
    for page, text in hook["written_pages"]().items():
        assert page.read_text() == text, "run python docs/.hooks/reference.py"


def test_every_exit_code_cause_transition_phase_and_series_is_documented() -> None:
    operations = (ROOT / "docs/operations/run.md").read_text()
    assert not [code for code in ExitCode if f"| {code.value} |" not in operations]
    policy = (ROOT / "docs/recovery-policy.md").read_text()
    assert not [cause for cause in Cause if f"| `{cause.value}` |" not in policy]
    table = (ROOT / "docs/architecture/store-and-api.md").read_text()
    assert not [state for state in TRANSITIONS if f"`{state.value}`" not in table]
    drills = (ROOT / "docs/operations/drills.md").read_text()
    assert not [phase for phase in PHASES if f"`{phase}`" not in drills]
    assert len(CrashPoint) == 16  # "sixteen points between transition and effect"


@EVERY_DOCUMENT
def test_documents_name_no_machine(document: Path) -> None:
    assert not re.findall(r"/(?:home|root|work|Users)/\S*", document.read_text())
