"""Levels of programs: derived from the spec and the newest attachment, with a way to the next."""

from __future__ import annotations

import re

import pytest

from holdfast_service.job_model.program_levels import (
    GIVES,
    Brings,
    ProgramLevel,
    brings,
    level_of,
    next_level,
    reads_steps,
)


@pytest.mark.parametrize("kind", [kind for kind in Brings if kind is not Brings.RECIPE])
def test_a_spec_brings_what_it_names(kind: Brings) -> None:
    assert brings({"recipe": "pretrain", **dict.fromkeys(Brings, None), kind: "x"}) is kind
    assert brings({"recipe": "pretrain"}) is Brings.RECIPE


def test_recipes_and_functions_have_the_highest_level_and_no_next_one() -> None:
    for kind in (Brings.RECIPE, Brings.FUNCTION):
        assert level_of(kind, 0, None) is ProgramLevel.CONTEXT
    assert next_level(Brings.FUNCTION, ProgramLevel.CONTEXT, shows_steps=True) is None


@pytest.mark.parametrize("kind", [kind for kind in Brings if kind.is_program])
def test_a_program_reaches_the_levels_one_after_the_other(kind: Brings) -> None:
    assert level_of(kind, 0, None) is None and next_level(kind, None, shows_steps=False) is None
    assert level_of(kind, 1, None) is ProgramLevel.SCRIPT
    assert level_of(kind, 2, {"attempt": 1, "level": 2}) is ProgramLevel.MEMORY_TIER
    assert level_of(kind, 1, {"level": 99}) is ProgramLevel.CONTEXT
    for level in (ProgramLevel.SCRIPT, ProgramLevel.PLUGIN, ProgramLevel.MEMORY_TIER):
        following = next_level(kind, level, shows_steps=True)
        assert following is not None and following.level == level + 1
        assert following.gives == GIVES[following.level] and following.lines
        blind = next_level(kind, level, shows_steps=False)
        assert blind is not None and blind.level is ProgramLevel.PLUGIN


@pytest.mark.parametrize(
    "level", [ProgramLevel.PLUGIN, ProgramLevel.MEMORY_TIER, ProgramLevel.CONTEXT]
)
@pytest.mark.parametrize("kind", [Brings.SCRIPT, Brings.RAY_TRAIN])
def test_the_lines_of_a_level_are_python(kind: Brings, level: ProgramLevel) -> None:
    following = next_level(kind, ProgramLevel(level - 1), shows_steps=True)
    assert following is not None
    compile(following.lines, "<lines>", "exec")


def test_printed_steps_become_known_without_a_change_of_the_code() -> None:
    """Where none is known yet, and not in the place of lines that the program has already."""
    for kind in (Brings.SCRIPT, Brings.COMMAND):
        for level in ProgramLevel:
            for shows_steps in (False, True):
                following = next_level(kind, level, shows_steps=shows_steps)
                lines = following.lines if following else ""
                assert ("program.metrics" in lines) is (level == 0 and not shows_steps)
                compile(lines, "<lines>", "exec")
                if pattern := re.search(r"program\.metrics=(.*)'", lines):
                    assert re.search(pattern[1], "step 7 loss 0.25")


def test_steps_are_read_from_lines_and_files_and_from_level_1_on() -> None:
    assert not reads_steps({"script": ["train.py"], "program": {"metrics": None}}, ProgramLevel(0))
    assert not reads_steps({"script": ["train.py"]}, ProgramLevel.SCRIPT)
    assert reads_steps({"program": {"metrics": "(?P<step>[0-9]+)"}}, ProgramLevel.SCRIPT)
    assert reads_steps({"program": {"event_files": "runs"}}, ProgramLevel.SCRIPT)
    assert reads_steps({}, ProgramLevel.PLUGIN)
