"""Which tests a run takes: a suite (`--suite`), a part of it (`--part 2/4`), or what a change can
reach (`--affected BASE`). The makefile composes its commands of these."""

from __future__ import annotations

import argparse
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import hypothesis
import pytest
from tests.support.suites.reach import EVERYTHING, Repository, distances, used_files

REAL = "cluster or chaos"
"""Tests that start Ray clusters, or kill, stop or partition processes: they run alone."""
APART = "soak or frameworks or gpu"
"""What has its own commands."""
SUITES = {
    "quick": f"not ({REAL} or {APART} or slow)",
    "real": f"(cell or story) and ({REAL}) and not ({APART})",
    "all-quick": f"not ({REAL} or {APART})",
    "all-real": f"({REAL}) and not ({APART})",
    "inner": f"not ({REAL} or {APART} or slow or seconds or web or database)",
}
"""Suite -> marks. `make test` runs `quick` and `real`, `make test-all` the two larger ones, and
`make test-quick` `inner`."""
IN_TABLES = ("cell", "story")
"""Marks that name a row of a table in CONTRIBUTING.md."""
REAL_TESTS_WEIGHT = 30
"""A real test takes as long as so many quick ones, roughly: for parts of equal length."""

WORLDS = (
    "tests/api/integrations/test_agreed_stop.py",
    "tests/api/integrations/test_memory_folders.py",
    "tests/benchmarks/test_meshes.py",
    "tests/benchmarks/test_resizes.py",
    "tests/workers/fault_injection/test_tensor_faults.py",
    "tests/workers/functions/",
    "tests/workers/parallelize/",
    "tests/workers/program_memory/",
    "tests/workers/recipes/",
    "tests/workers/state/test_replicas.py",
    "tests/workers/training/",
    "tests/workers/worker/",
)
"""Tests that start worlds of several ranks."""
REPEATABLE = {"quick", "real", "inner"}
"""Suites whose random examples are the same in every run: none is red by chance. The larger ones
search on, and print how to repeat what they find."""
REPEATABLE_PROFILE = "repeatable"
hypothesis.settings.register_profile(REPEATABLE_PROFILE, deadline=None, derandomize=True)

_affected = pytest.StashKey[Mapping[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites of Holdfast")
    group.addoption("--suite", choices=SUITES, help="the tests of a suite; see CONTRIBUTING.md")
    group.addoption("--part", metavar="K/N", type=_part, help="the K-th of N parts, by modules")
    group.addoption("--affected", metavar="BASE", help="tests that the change since BASE can reach")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if suite := config.option.suite:
        if suite in REPEATABLE:
            hypothesis.settings.load_profile(REPEATABLE_PROFILE)
        own = config.option.markexpr
        config.option.markexpr = f"{SUITES[suite]} and ({own})" if own else SUITES[suite]
    if base := config.option.affected:
        try:
            config.stash[_affected] = affected_files(config.rootpath, base)
        except subprocess.CalledProcessError as error:
            raise pytest.UsageError(f"--affected {base}: {error.stderr.strip()}") from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the suite `real`, only files with a mark of CONTRIBUTING.md are imported: a tenth of them.
    `tests/project/test_suites.py` finds the marks by the same words."""
    if config.option.suite != "real" or not collection_path.name.startswith("test_"):
        return None
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(f"mark.{mark}(" in text for mark in IN_TABLES) else True


def pytest_report_header(config: pytest.Config) -> str | None:
    reached = config.stash.get(_affected, None)
    if reached is None:
        return None
    changed = sum(distance == 0 for distance in reached.values())
    tests = sum(_is_test(path) for path in reached)
    return f"affected: {changed} changed files reach {tests} files of tests"


@pytest.hookimpl(trylast=True)  # of the tests that the marks leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = list(items)
    if (reached := config.stash.get(_affected, None)) is not None:
        kept = [item for item in kept if _path(item) in reached]
        kept.sort(key=lambda item: (_weight(item), reached[_path(item)]))  # the nearest ones first
    if part := config.option.part:
        weights: dict[str, int] = defaultdict(int)
        for item in kept:
            weights[_path(item)] += _weight(item)
        own = modules_of_part(weights, *part)
        kept = [item for item in kept if _path(item) in own]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
    for item in kept:
        if name := _group(item):
            item.add_marker(pytest.mark.xdist_group(name))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A change or a part without any test is no error."""
    asked = session.config.option.affected or session.config.option.part
    if asked and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def affected_files(root: Path, base: str) -> Mapping[str, int]:
    """The files that the change since the commit `base` can reach, with the length of the way; the
    change includes what is not committed. Raises CalledProcessError for an unknown commit."""
    changed = {*_git(root, "diff", "--name-only", base), *_git(root, *_UNTRACKED)}
    files = {*_git(root, "ls-files"), *_git(root, *_UNTRACKED)}
    present = frozenset(path for path in files if (root / path).is_file())
    if not changed.isdisjoint(EVERYTHING):
        return {**dict.fromkeys(present, 1), **dict.fromkeys(changed, 0)}
    return distances(used_files(Repository(root, present)), changed)


def modules_of_part(weights: Mapping[str, int], part: int, parts: int) -> set[str]:
    """Deals modules to parts of nearly equal weight: the heaviest first, each to the lightest."""
    loads = [0] * parts
    own = set()
    for module in sorted(weights, key=lambda module: (-weights[module], module)):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[module]
        if lightest == part - 1:
            own.add(module)
    return own


def _group(item: pytest.Item) -> str | None:
    """Tests of a group run in one process of `pytest -n` (`--dist loadgroup`). Two worlds of ranks
    beside each other wait for processors in every collective, and take ten times as long."""
    if _path(item).startswith(WORLDS):
        return "worlds"
    return "browser" if "web" in item.keywords else None


_UNTRACKED = ("ls-files", "--others", "--exclude-standard")


def _git(root: Path, *arguments: str) -> Iterable[str]:
    command = ["git", "-c", "core.quotePath=false", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _part(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        message = f"{text!r} is no part: write 2/4 for the second of four"
        raise argparse.ArgumentTypeError(message)
    return int(part), int(parts)


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")


def _weight(item: pytest.Item) -> int:
    is_real = any(mark in item.keywords for mark in ("cluster", "chaos"))
    return REAL_TESTS_WEIGHT if is_real else 1
