"""What the end of pytest says about a mutation. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tests.mutation.selection import Mutation

OK, TESTS_FAILED, NOTHING_COLLECTED = 0, 1, 5

_SUMMARY = re.compile(r"^=*\s*short test summary info\s*=*$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?P<test>.+?)(?: - .*)?$", re.MULTILINE)
_BROKEN_IMPORT = re.compile(r"ImportError while loading conftest '(?P<path>[^']+)'")
_INTERNAL_ERROR = re.compile(
    r"^INTERNALERROR> (?P<error>[A-Za-z_.]+(?:Error|Exception)\b.*)$", re.M
)


class Outcome(StrEnum):
    CAUGHT = "caught"
    SURVIVED = "survived"
    UNDECIDED = "no failure in time"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    caught_by: str = ""
    remark: str = ""
    """Why it counts as caught although no test has failed."""


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    verdict: Verdict
    seconds: float


class SuiteFault(Exception):
    """pytest itself could not run: nothing is known of the mutation."""


def verdict(exit_code: int, output: str) -> Verdict:
    """The verdict of one command. Raises SuiteFault."""
    test = _first_failure(output)
    if exit_code in {OK, NOTHING_COLLECTED}:
        return Verdict(Outcome.SURVIVED)
    if exit_code == TESTS_FAILED:
        return Verdict(Outcome.CAUGHT, test or "a test that pytest does not name")
    if exit_code < 0:
        return Verdict(Outcome.CAUGHT, test, f"signal {-exit_code} ended pytest")
    if test:  # `pytest -n` with `-x` ends with code 2 after a failed test too
        remark = "" if "::" in test else f"pytest ended with code {exit_code}: cannot be collected"
        return Verdict(Outcome.CAUGHT, test, remark)
    if found := _BROKEN_IMPORT.search(output):
        return Verdict(Outcome.CAUGHT, found["path"], "an import failed: no test was collected")
    if found := _INTERNAL_ERROR.search(output):
        return Verdict(Outcome.CAUGHT, "", f"pytest failed: {found['error']}")
    tail = "\n".join(output.splitlines()[-15:])
    raise SuiteFault(f"pytest ended with code {exit_code} and names no failed test:\n{tail}")


def _first_failure(output: str) -> str:
    """The first failed test of the summary; captured logs before it may look alike."""
    summaries = list(_SUMMARY.finditer(output))
    found = _FAILED.search(output, summaries[-1].end()) if summaries else None
    return found["test"] if found else ""
