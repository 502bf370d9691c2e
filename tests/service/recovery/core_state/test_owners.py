"""Each part of the core's state has one owner: no other class changes its fields."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service import recovery

ROOM = Path(recovery.__file__).parent
MUTATORS = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "setdefault",
        "update",
        "difference_update",
        "intersection_update",
        "symmetric_difference_update",
    ]
)


Owners = dict[str, set[tuple[Path, str]]]
"""Field → the classes of `core_state` that may change it, each with its file."""


def owned_fields() -> Owners:
    owned: Owners = {}
    for path in sorted((ROOM / "core_state").glob("*.py")):
        module = importlib.import_module(f"{recovery.__name__}.core_state.{path.stem}")
        for item in vars(module).values():
            if not isinstance(item, type) or item.__module__ != module.__name__:
                continue
            for name in changeable_fields(item, path):
                owned.setdefault(name, set()).add((path, item.__name__))
    return owned


def changeable_fields(owner: type, path: Path) -> set[str]:
    """The fields of a dataclass that is not frozen, or of a plain class."""
    if dataclasses.is_dataclass(owner):
        frozen = owner.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return set() if frozen else {field.name for field in dataclasses.fields(owner)}
    definition = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    return {
        target.attr
        for node in ast.walk(definition)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in targets_of(node)
        if isinstance(target, ast.Attribute)
    }


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement assigns to or deletes, without brackets and stars."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            pending = list(targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            pending = [target]
        case ast.For(target=target) | ast.NamedExpr(target=target):
            pending = [target]
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
            pending = [value]
        case _:
            return
    while pending:
        target = pending.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pending += target.elts
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            pending.append(target.value)
        else:
            yield target


def changes(path: Path, source: str, owned: Owners) -> list[str]:
    """The statements of a file that change a field of another owner."""
    found = []
    for part in ast.parse(source).body:
        here = (path, part.name if isinstance(part, ast.ClassDef) else "")
        found += [
            f"{path.relative_to(ROOM)}:{target.lineno}: {ast.unparse(node)}"
            for node in ast.walk(part)
            for target in targets_of(node)
            if isinstance(target, ast.Attribute) and here not in owned.get(target.attr, {here})
        ]
    return found


def test_only_its_owner_changes_a_part_of_the_state() -> None:
    owned = owned_fields()
    assert {"awaiting", "committed", "failures", "deadline", "bad_uris", "joined"} <= owned.keys()
    files = sorted(ROOM.rglob("*.py"))
    assert not [line for path in files for line in changes(path, path.read_text(), owned)]
    assert not [path for path in files if "setattr(" in path.read_text()]


@pytest.mark.parametrize(
    "statement",
    [
        "state.fencing.awaiting = set()",
        "state.fencing.awaiting |= {agent}",
        "state.progress.floor, count = step, 0",
        "state.nodes.health[agent] = health",
        "del state.nodes.unchecked[agent]",
        "state.saves.remotes.pop(uri)",
        "member.joined = True",
    ],
)
def test_a_change_outside_of_the_owner_is_found(statement: str) -> None:
    assert changes(ROOM / "faults/judgement.py", statement, owned_fields())


def test_a_change_by_another_class_of_the_same_file_is_found() -> None:
    source = "class MeshChange:\n    def begin(self, growth):\n        growth.resizes = ()\n"
    path = ROOM / "core_state/mesh_change.py"
    assert changes(path, source, owned_fields())
    assert not changes(path, source.replace("MeshChange", "Growth"), owned_fields())
