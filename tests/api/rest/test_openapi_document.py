"""The API changes by decision only: its document is committed and compared with the one before."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.rest import openapi

Document = dict[str, Any]
ROOT = Path(__file__).parents[3]
COMMITTED, PROJECT = "api/openapi.json", "pyproject.toml"
DECIDED: frozenset[str] = frozenset(
    {
        # There are other optimizers; null: the optimizer lacks the field.
        "/components/schemas/OptimizerSpec/properties/betas/prefixItems/type: number",
        "/components/schemas/OptimizerSpec/properties/betas/type: array",
        "/components/schemas/OptimizerSpec/properties/eps/exclusiveMinimum: 0",
        "/components/schemas/OptimizerSpec/properties/eps/type: number",
        "/components/schemas/OptimizerSpec/properties/name/const: adamw",
        # null: the configuration of a model of the library transformers may name none.
        "/components/schemas/PublishedSpec/properties/positions/type: integer",
    }
)
"""What the newest change of the document breaks on purpose; beside each line, why."""
RENAMED: dict[str, str] = {}
"""Schemas that the newest change renamed on purpose: what a client reads is the same."""
_HARMLESS = re.compile("description|title|summary|tags|example|default|max|min|pattern|operation")


def test_the_committed_document_is_that_of_the_server() -> None:
    written = (ROOT / COMMITTED).read_text() == openapi.text()
    assert written, "run `python -m holdfast.rest.openapi > api/openapi.json` and read its diff"


def test_each_operation_has_a_name_of_its_own() -> None:
    paths = openapi.document()["paths"].values()
    names = [operation["operationId"] for path in paths for operation in path.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_the_last_change_of_the_document_breaks_no_client() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return  # an export: there is no earlier document
    now, version = json.loads((ROOT / COMMITTED).read_text()), (ROOT / PROJECT).read_text()
    for commit in git("log", "-2", "--format=%H", "--", COMMITTED).split():
        text = git("show", f"{commit}:{COMMITTED}")
        for old, new in RENAMED.items():
            text = re.sub(rf"\b{old}\b", new, text)
        before = json.loads(text)
        if before != now:
            same = major(git("show", f"{commit}:{PROJECT}")) == major(version)
            assert not same or sorted(broken(before, now) - DECIDED) == []
            return


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda d: d["paths"].pop("/version"), "/paths//version/get"),
        (lambda d: _part(d, "JobView", "properties").pop("name"), "/JobView/properties/name/type"),
        (lambda d: _part(d, "JobView", "required").remove("name"), "/JobView/required: name"),
        (lambda d: _part(d, "Cordon", "required").append("until"), "/Cordon/required: until"),
        (lambda d: _part(d, "State", "enum").remove("PAUSED"), "/State/enum: PAUSED"),
        (
            lambda d: _part(d, "Problem", "properties")["code"]["x-statuses"].pop("job_ended"),
            "/Problem/properties/code/x-statuses/job_ended: 409",
        ),
    ],
)
def test_what_breaks_a_client_is_found(change: Callable[[Document], object], lines: str) -> None:
    document = (ROOT / COMMITTED).read_text()
    change(changed := json.loads(document))
    assert any(lines in line for line in broken(json.loads(document), changed))
    assert not broken(json.loads(document), json.loads(document))


def broken(before: Document, now: Document) -> set[str]:
    """What clients use and has changed or is gone, and what they must send now."""
    had, has = set(_leaves(before)), set(_leaves(now))
    sent = re.compile("/parameters/|/requestBody/" + "".join(f"|/{name}/" for name in _sent(now)))
    demands = {line for line in has - had if "/required: " in line and sent.search(line)}
    places = {line: re.split("/parameters/|/requestBody/|/required", line)[0] for line in demands}
    new = {each for each in demands if any(old.startswith(places[each] + "/") for old in had)}
    return (had - has) | {line for line in new if not line.endswith("False")}


def _leaves(part: Any, place: str = "") -> Iterator[str]:
    """A line for each value that clients depend on, at its place; items of lists have no order."""
    if isinstance(part, dict):
        for key, value in part.items():
            if place.endswith("/properties") or not _HARMLESS.match(key):
                yield from _leaves(value, f"{place}/{key}")
    elif isinstance(part, list):
        for item in part:
            named = isinstance(item, dict) and "name" in item
            yield from _leaves(item, f"{place}/{item['name']}" if named else place)
    else:
        yield f"{place}: {part}"


def _sent(document: Document) -> set[str]:
    """The names of all schemas of which a request may have a value."""
    operations = [each for path in document["paths"].values() for each in path.values()]
    text = json.dumps([operation.get("requestBody") for operation in operations])
    found: set[str] = set()
    while new := set(re.findall(r'schemas/(\w+)"', text)) - found:
        found |= new
        text = json.dumps([document["components"]["schemas"][name] for name in new])
    return found


def _part(document: Document, schema: str, part: str) -> Any:
    return document["components"]["schemas"][schema].setdefault(part, [])


def major(project: str) -> str:
    return project.partition('\nversion = "')[2].partition(".")[0]


def git(*arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]  # also of another user
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
