"""Which files of the repository use which, so that the tests that a change can reach are known.

Edges are the imports of the packages (grimp), and for tests and benchmarks those of their syntax
trees; every module or file that is named in a string; a `conftest.py` whose fixture a test asks
for; and `UNSEEN`, what none of these show. A file that is named nowhere reaches only itself.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

import grimp

ROOTS = {"holdfast": "api", "holdfast_service": "service", "holdfast_workers": "workers"}
"""The packages, and the folder that each is in."""
WITHOUT_PACKAGE = ("tests", "benchmarks")
"""Folders whose modules have the name of their path."""
EVERYTHING = ("pyproject.toml", "requirements.lock", "tests/conftest.py")
"""A change to one of these reaches every test."""
_COMMAND = "api/holdfast/__main__.py"
UNSEEN = {
    "api/holdfast/rest/app.py": ("api/holdfast/rest/routes",),  # every module of this room
    "tests/web/conftest.py": ("api/dashboard",),  # its browser shows what was built from this
    "tests/end_to_end/test_light_client.py": ("api/dashboard", _COMMAND),
    "tests/machine_room/test_doctor.py": (_COMMAND,),
    "tests/project/test_deploy_image.py": (_COMMAND,),
    "tests/project/test_docs.py": ("docs", "README.md", "CONTRIBUTING.md", "api/dashboard/src"),
    "tests/support/machine_room/training_room.py": (_COMMAND,),
    "tests/support/machine_room/followed_document.py": (_COMMAND,),
    "service/holdfast_service/store/engine.py": ("service/holdfast_service/store/migrations",),
}
"""File -> files and folders that it uses without naming them as a module or in a string."""

_NAMES = "|".join((*ROOTS, *WITHOUT_PACKAGE))
_DOTTED = re.compile(rf"(?<![\w.])(?:{_NAMES})(?:\.\w+)+\.?")
_ENTRY_POINT = re.compile(r"(\w+(?:\.\w+)+\.?)(:\w+)?")
_IMPORTED = re.compile(rf"\b(?:import|from) ({_NAMES})\b(?!\.)")
SHORTEST_NAME = 4
"""Shorter strings are no name of a file."""


@dataclass(frozen=True)
class Repository:
    """The files of a checkout, by paths from its root in POSIX form."""

    root: Path
    files: frozenset[str]

    @cache  # noqa: B019 - there is one repository per run
    def nodes(self, path: str) -> list[ast.AST]:
        """The syntax tree of a Python file, as a list; the module is the first."""
        return list(ast.walk(ast.parse((self.root / path).read_text())))

    def modules(self) -> dict[str, str]:
        """Module -> path."""
        found = {}
        for path in self.files:
            if name := _module(path):
                found[name] = path
        return found


def used_files(repository: Repository, packages: Iterable[str] = ROOTS) -> dict[str, set[str]]:
    """File -> the files that it uses itself. `packages` are installed, and searched for imports."""
    modules = repository.modules()
    uses: dict[str, set[str]] = defaultdict(set)
    for name, used in _imports(packages):
        if name in modules and used in modules:
            uses[modules[name]].add(modules[used])
    named = _NamedFiles(repository.files)
    for name, path in modules.items():
        nodes = repository.nodes(path)
        if path.startswith(WITHOUT_PACKAGE):
            found = {*_named_modules(nodes), *_imported_modules(nodes)}
        else:
            found = set(_entry_points(nodes, name))
        for reference in found:
            uses[path].update(modules[used] for used in _resolve(reference, modules))
        for text in _strings(nodes):
            uses[path].update(named.of(text))
        if (parent := name.rpartition(".")[0]) in modules:
            uses[path].add(modules[parent])  # importing a module runs its package
    for path in repository.files:
        if path.startswith("tests/") and path.endswith(".py"):
            uses[path].update(_conftests(path, repository))
    for path in UNSEEN.keys() & repository.files:
        uses[path].update(f for f in repository.files if _is_in(f, UNSEEN[path]))
    return uses


def distances(uses: Mapping[str, Set[str]], changed: Iterable[str]) -> dict[str, int]:
    """Each file that a change reaches, with the length of the shortest way to it."""
    users: dict[str, set[str]] = defaultdict(set)
    for path, used in uses.items():
        for other in used:
            users[other].add(path)
    found = dict.fromkeys(changed, 0)
    waiting = deque(found)
    while waiting:
        path = waiting.popleft()
        for user in users[path] - found.keys():
            found[user] = found[path] + 1
            waiting.append(user)
    return found


def _imports(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(module, module that it imports), functions' own imports included."""
    if names := list(packages):
        graph = grimp.build_graph(*names, cache_dir=None)
        for name in graph.modules:
            for used in graph.find_modules_directly_imported_by(name):
                yield name, used


class _NamedFiles:
    """Files that are no module, by the strings that name them: a path, a folder above it, or the
    last part of the path."""

    def __init__(self, files: Set[str]) -> None:
        self._by_name: dict[str, set[str]] = defaultdict(set)
        for path in files:
            if _module(path) is None:
                pure = PurePosixPath(path)
                for name in (path, pure.name, *map(str, pure.parents)):
                    if len(name) >= SHORTEST_NAME:
                        self._by_name[name].add(path)

    def of(self, text: str) -> Set[str]:
        return self._by_name.get(text.strip("/"), set())


def _module(path: str) -> str | None:
    """The name of the module in this file, if it is one of ours."""
    pure = PurePosixPath(path)
    if pure.suffix != ".py":
        return None
    parts = pure.with_suffix("").parts
    if len(parts) > 1 and ROOTS.get(parts[1]) == parts[0]:
        parts = parts[1:]
    elif parts[0] not in WITHOUT_PACKAGE:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _strings(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _entry_points(nodes: Sequence[ast.AST], module: str) -> Iterator[str]:
    """Modules that a module of the packages starts or loads by name: a string that is nothing but
    `module`, `module:name`, or the same below its own package. A name of a package above it is for
    users' jobs, whose tests name it too."""
    package = module.partition(".")[0]
    at_most = [*ROOTS].index(package)
    for text in _strings(nodes):
        if found := _ENTRY_POINT.fullmatch(text):
            name = found[1]
            if name.partition(".")[0] in [*ROOTS][at_most:]:
                yield name
            elif found[2] and name.partition(".")[0] not in ROOTS:
                yield f"{package}.{name}"


def _named_modules(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Dotted names in strings, code in strings included; the programs that a command starts."""
    docstrings = set(_docstrings(nodes))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                continue
            yield from (name.group() for name in _DOTTED.finditer(node.value))
            yield from _IMPORTED.findall(node.value)
        if isinstance(node, ast.List | ast.Tuple):
            words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            for first, second in pairwise(words):
                if first == "-m" and second in ROOTS:
                    yield f"{second}.__main__"


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """The nodes of strings that stand alone: documentation, which nothing runs."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _imported_modules(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _resolve(reference: str, modules: Mapping[str, str]) -> Iterator[str]:
    """The module of a dotted name, which may end in a name of that module; of a name that ends in a
    dot, all modules below."""
    if reference.endswith("."):
        yield from (name for name in modules if name.startswith(reference))
    name = reference.rstrip(".")
    while name and name not in modules:
        name = name.rpartition(".")[0]
    if name:
        yield name


def _conftests(path: str, repository: Repository) -> Iterator[str]:
    """The files above a test that define a fixture which it, or one of these files, names."""
    wanted = set(_wanted(repository.nodes(path)))
    for folder in PurePosixPath(path).parents:
        conftest = str(folder / "conftest.py")
        if conftest != path and conftest in repository.files:
            nodes = repository.nodes(conftest)
            if wanted & set(_fixtures(nodes)):
                yield conftest
                wanted.update(_wanted(nodes))


def _wanted(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names of arguments and in strings: each may be that of a fixture."""
    yield from _strings(nodes)
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg


def _fixtures(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that a conftest.py defines or imports: each may be that of a fixture."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
