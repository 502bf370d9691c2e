"""A mutated file is restored, whatever the suite or the user does. Real processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.__main__ import measure
from tests.mutation.mutants import Kind, sites
from tests.mutation.selection import Mutation
from tests.mutation.trials import (
    CommitMeanwhile,
    EndRequest,
    UncommittedChanges,
    require_committed,
    try_mutation,
)
from tests.mutation.verdicts import Outcome, Result, SuiteFault
from tests.support.waiting import DEADLINE_S, eventually

ROOT = Path(__file__).parents[2]
SOURCE = "x = a == b  # größer\r\n"
MUTATED = "x = a != b  # größer\r\n"
LONG_AGO_S = 1_000_000_000


@pytest.fixture
def product(tmp_path: Path) -> Path:
    path = tmp_path / "product.py"
    path.write_bytes(SOURCE.encode())
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return path


def comparison() -> Mutation:
    (site,) = (site for site in sites(SOURCE) if site.kind is Kind.COMPARISON)
    return Mutation(1, "memory", "product.py", site)


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def require_restored(product: Path) -> None:
    assert product.read_bytes() == SOURCE.encode()
    assert product.stat().st_mtime == LONG_AGO_S, "compiled modules of the mutation are outdated"


@pytest.mark.parametrize(("code", "outcome"), [(0, Outcome.SURVIVED), (1, Outcome.CAUGHT)])
def test_the_commands_run_with_the_mutation_until_one_fails(
    product: Path, code: int, outcome: Outcome
) -> None:
    commands = [shell(f"cp product.py first; exit {code}"), shell("touch second; exit 5")]
    result = try_mutation(product.parent, comparison(), commands, DEADLINE_S, EndRequest())
    assert result.verdict.outcome is outcome
    assert (product.parent / "first").read_bytes() == MUTATED.encode()
    assert (product.parent / "second").exists() is (code == 0)
    require_restored(product)


def test_a_suite_that_cannot_run_leaves_no_mutation(product: Path) -> None:
    with pytest.raises(SuiteFault):
        try_mutation(product.parent, comparison(), [shell("exit 4")], DEADLINE_S, EndRequest())
    with pytest.raises(FileNotFoundError):
        try_mutation(product.parent, comparison(), [["/no/such"]], DEADLINE_S, EndRequest())
    require_restored(product)


def test_a_file_that_the_suite_removed_is_restored(product: Path) -> None:
    try_mutation(product.parent, comparison(), [shell("rm product.py")], DEADLINE_S, EndRequest())
    require_restored(product)


def test_at_the_limit_the_file_is_restored_and_every_process_ends(product: Path) -> None:
    script = "trap 'cp product.py at_end; exit' INT; sleep 600 & echo $! > pid; wait"
    result = try_mutation(product.parent, comparison(), [shell(script)], 0.3, EndRequest())
    assert result.verdict.outcome is Outcome.UNDECIDED
    assert (product.parent / "at_end").read_bytes() == SOURCE.encode(), "restored first"
    child = int((product.parent / "pid").read_text())
    eventually(lambda: has_ended(child))
    require_restored(product)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_after_the_file_is_restored(
    product: Path, number: signal.Signals
) -> None:
    program = f"""
from pathlib import Path
from tests.mutation.mutants import Kind, Site
from tests.mutation.selection import Mutation
from tests.mutation.trials import end_request, try_mutation
mutation = Mutation(1, "memory", "product.py", Site(Kind.COMPARISON, 1, 6, 8, "==", "!=", "", ""))
command = ["sh", "-c", "echo $$ > started; exec sleep 600"]
with end_request() as request:
    try_mutation(Path({str(product.parent)!r}), mutation, [command], 600.0, request)
"""
    started = product.parent / "started"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        eventually(lambda: started.exists() and started.read_text())
        assert product.read_bytes() == MUTATED.encode()
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 128 + number
    finally:
        process.kill()
    require_restored(product)
    assert has_ended(int(started.read_text()))


def test_a_checkout_with_uncommitted_changes_of_the_product_is_refused(checkout: Path) -> None:
    (checkout / "docs/file").write_text("other")
    require_committed(checkout)
    (checkout / "workers/file").write_text("other")
    with pytest.raises(UncommittedChanges, match=r"(?s)commit first.*workers/file"):
        require_committed(checkout)


def test_results_before_an_interruption_are_kept(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkout / "results.jsonl"
    mutations = [replace(comparison(), number=n, path="workers/file") for n in (1, 2, 3)]
    summary = "== short test summary info ==\\nFAILED tests/x.py::test_y - Error\\n"
    once = f"[ -e ran ] && exit 4; touch ran; printf '{summary}'; exit 1"
    options = argparse.Namespace(json=path, limit_s=DEADLINE_S, suite="affected", seed=35)
    results: list[Result] = []
    with pytest.raises(SuiteFault):
        measure(checkout, mutations, [shell(once)], options, results)
    assert [result.verdict.caught_by for result in results] == ["tests/x.py::test_y"]
    (line,) = path.read_text().splitlines()
    assert {"number": 1, "outcome": "caught", "seed": 35}.items() <= json.loads(line).items()
    assert "2. comparison in workers/file:1: a == b -> a != b" in capsys.readouterr().out
    require_committed(checkout)


def test_a_commit_while_a_mutation_is_in_the_checkout_is_reported(checkout: Path) -> None:
    commit = "git -c user.name=a -c user.email=a@b commit -qam mutated"
    options = argparse.Namespace(json=None, limit_s=DEADLINE_S, suite="affected", seed=35)
    mutation = replace(comparison(), path="workers/file")
    with pytest.raises(CommitMeanwhile, match="while workers/file was mutated"):
        measure(checkout, [mutation], [shell(commit)], options, [])
    assert (checkout / "workers/file").read_bytes() == SOURCE.encode()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a file of each package and of the documents."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for folder in ("api", "service", "workers", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(SOURCE.encode())
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    return tmp_path


def has_ended(pid: int) -> bool:
    """Also if its parent has not yet asked for its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
