"""A framework's folders in memory, of two ranks on one node: kept by all or by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import folder_programs
from tests.support.programs.folder_programs import LARGE, SMALL
from tests.support.programs.tier_worlds import TierWorlds, from_memory


@pytest.fixture
def worlds(tmp_path: Path) -> TierWorlds:
    return TierWorlds(tmp_path)


def again(step: int) -> dict[str, Any]:
    return {"attempt": 2, "restore": from_memory(step), "one_node": True}


@pytest.mark.seconds
def test_memory_without_room_for_the_files_or_the_segment_ends_no_training(
    worlds: TierWorlds,
) -> None:
    steps = {1: (LARGE, False), 2: (SMALL, False), 3: (LARGE, True)}
    kept = worlds.run(folder_programs.keep, 2, steps, one_node=True)
    assert kept == [[False, False, True]] * 2
    files = ["part-0", "part-1"]
    assert worlds.run(folder_programs.load, 2, None, True, **again(3)) == [files, files]


def test_without_room_an_older_checkpoint_is_loaded_and_training_never_begins_anew(
    worlds: TierWorlds,
) -> None:
    worlds.run(folder_programs.keep, 2, {3: (LARGE, True)}, one_node=True)
    assert worlds.run(folder_programs.load, 2, 2, False, **again(3)) == [None, None]
    failed = worlds.run(folder_programs.load, 2, None, False, **again(3))
    assert failed == ["StateMissing", "StateMissing"]


@pytest.mark.seconds
def test_a_job_without_a_memory_tier_keeps_nothing(worlds: TierWorlds) -> None:
    steps = {1: (SMALL, True)}
    assert worlds.run(folder_programs.keep, 2, steps, "0", one_node=True) == [[False]] * 2
    assert list(worlds.folder.rglob("*.seg")) == []


@pytest.mark.parametrize(
    ("every_steps", "names"),
    [
        ("1", ["HoldfastProgress", "HoldfastMemory", "HoldfastMemory"]),
        ("0", ["HoldfastProgress", "Callback"]),
    ],
)
def test_lightning_has_a_callback_for_memory_if_the_job_has_a_memory_tier(
    worlds: TierWorlds, every_steps: str, names: list[str]
) -> None:
    assert worlds.run(folder_programs.lightning_callbacks, 1, every_steps) == [names]


def test_lightning_resumes_from_memory_on_both_ranks_of_a_node(worlds: TierWorlds) -> None:
    content = bytes(range(256))
    worlds.run(folder_programs.keep_checkpoint, 2, content, one_node=True)
    assert worlds.run(folder_programs.resume_trainer, 2, **again(10)) == [content, content]
