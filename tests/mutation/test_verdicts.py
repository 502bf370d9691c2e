"""What the end of a command of the suite says of a mutation."""

from __future__ import annotations

import pytest

from tests.mutation.verdicts import Outcome, SuiteFault, Verdict, verdict

SUMMARY = """
ERROR    holdfast:core.py:12 a captured log, before the summary
=========================== short test summary info ============================
SKIPPED [1] tests/x.py:1: no GPU
FAILED tests/a/test_b.py::test_c[d - e] - AssertionError: text
ERROR tests/a/test_f.py - ImportError: text
!!!!!!!!!!!!!!!!!!!!!!!!!! stopping after 1 failures !!!!!!!!!!!!!!!!!!!!!!!!!!!
"""
COLLECTION = """
==== short test summary info ====
ERROR tests/a/test_f.py
"""


def test_a_suite_without_a_failure_or_without_a_test_lets_the_mutation_survive() -> None:
    assert verdict(0, "5 passed") == verdict(5, "no tests ran") == Verdict(Outcome.SURVIVED)


def test_the_first_failed_test_of_the_summary_caught_the_mutation() -> None:
    found = verdict(1, SUMMARY.replace("[d - e]", "[d-e]"))
    assert found == Verdict(Outcome.CAUGHT, "tests/a/test_b.py::test_c[d-e]")
    assert verdict(2, SUMMARY.replace("[d - e]", "[d-e]")) == found, "as `pytest -n -x` ends"
    assert verdict(1, "").outcome is Outcome.CAUGHT


@pytest.mark.parametrize(
    ("exit_code", "output", "caught_by"),
    [
        (2, COLLECTION, "tests/a/test_f.py"),
        (4, "ImportError while loading conftest '/x/tests/conftest.py'.", "/x/tests/conftest.py"),
        (3, "INTERNALERROR> Traceback\nINTERNALERROR> builtins.KeyError: 'a'\n", ""),
        (-11, "", ""),
    ],
)
def test_a_suite_that_the_mutation_breaks_caught_it_and_says_so(
    exit_code: int, output: str, caught_by: str
) -> None:
    found = verdict(exit_code, output)
    assert (found.outcome, found.caught_by) == (Outcome.CAUGHT, caught_by)
    assert found.remark


def test_a_wrong_command_is_no_catch() -> None:
    with pytest.raises(SuiteFault, match="unrecognized arguments: --affected"):
        verdict(4, "ERROR: usage: pytest\npytest: error: unrecognized arguments: --affected=HEAD")
