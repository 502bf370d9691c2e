"""The folder of a run counts a checkpoint wholly or not at all, and keeps what is configured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.ray_train.errors import StorageUnusable
from holdfast.integrations.ray_train.run_folder import (
    LIST_NAME,
    KeptCheckpoint,
    Retention,
    RunFolder,
    plain,
    read_list,
    read_result,
)

SCORES = st.none() | st.floats() | st.text(max_size=2) | st.booleans() | st.integers(-9, 9)
SAVED = st.lists(SCORES, min_size=1, max_size=12).map(
    lambda scores: [
        KeptCheckpoint(index, f"checkpoint_{index}", {"score": score})
        for index, score in enumerate(scores, start=1)
    ]
)


def opened(path: Path, attempt: int = 1, retention: Retention | None = None) -> RunFolder:
    folder = RunFolder(path, attempt, retention or Retention())
    folder.open()
    return folder


def save(folder: RunFolder, tmp_path: Path, index: int, name: str = "") -> None:
    part = tmp_path / f"part-{index}"
    part.mkdir(exist_ok=True)
    (part / "state").write_text(f"report {index}")
    folder.add_part(part, index)
    path = folder.place(index, name or f"checkpoint_{index}")
    folder.commit(KeptCheckpoint(index, str(path), {"score": float(index)}))


@given(SAVED, st.integers(1, 12), st.sampled_from(["score", None]), st.sampled_from(["max", "min"]))
def test_the_newest_is_kept_and_of_the_others_none_better_is_removed(
    saved: list[KeptCheckpoint], most: int, attribute: str | None, order: str
) -> None:
    kept = Retention(most, attribute, order).kept(saved)
    assert saved[-1] in kept
    assert kept == sorted(kept, key=lambda each: each.index)
    assert min(most, len(saved)) <= len(kept) <= most + 1
    if attribute is None:
        assert kept == saved[-most:]
        return
    removed = [each for each in saved if each not in kept]
    sign = 1 if order == "max" else -1
    scores = [sign * each.metrics["score"] for each in removed if _is_score(each)]
    others = [sign * each.metrics["score"] for each in kept[:-1] if _is_score(each)]
    assert not scores or not others or max(scores) <= min(others)


def _is_score(saved: KeptCheckpoint) -> bool:
    value = saved.metrics["score"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value)


def test_a_checkpoint_counts_once_the_list_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = opened(path)
    save(folder, tmp_path, 1)
    folder.add_part(tmp_path / "part-1", 2)
    assert [each.index for each in read_list(path)] == [1]
    folder.place(2, "checkpoint_2")
    assert [each.index for each in read_list(path)] == [1]
    again = opened(path, attempt=2)
    assert again.newest is not None and again.newest.index == 1
    save(again, tmp_path, 2)
    assert (Path(read_list(path)[-1].path) / "state").read_text() == "report 2"


def test_what_an_ended_attempt_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = opened(path)
    save(folder, tmp_path, 1)
    folder.add_part(tmp_path / "part-1", 2)
    folder.mark("word")
    opened(path, attempt=2)
    assert sorted(each.name for each in path.iterdir()) == ["checkpoint_1", LIST_NAME]


def test_a_folder_whose_name_comes_again_is_replaced(tmp_path: Path) -> None:
    folder = opened(tmp_path / "run")
    save(folder, tmp_path, 1, "same")
    save(folder, tmp_path, 2, "same")
    (only,) = read_list(tmp_path / "run")
    assert (only.index, (Path(only.path) / "state").read_text()) == (2, "report 2")


def test_checkpoints_that_are_not_kept_are_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path / "run", retention=Retention(2))
    for index in range(1, 6):
        save(folder, tmp_path, index)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*")) == [
        "checkpoint_4",
        "checkpoint_5",
    ]


def test_a_moved_run_finds_its_checkpoints(tmp_path: Path) -> None:
    save(opened(tmp_path / "run"), tmp_path, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    (found,) = read_list(tmp_path / "moved")
    assert (Path(found.path) / "state").is_file()


@pytest.mark.parametrize("text", ["", "{", "{}", '{"checkpoints": [{}]}', "[]"])
def test_a_damaged_list_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / LIST_NAME).write_text(text)
    with pytest.raises(StorageUnusable, match=LIST_NAME):
        read_list(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnusable, match="storage_path"):
        opened(tmp_path / "file" / "run")


def test_metrics_become_plain_numbers(tmp_path: Path) -> None:
    values: dict[Any, Any] = {"a": np.float32(0.5), "b": torch.tensor(2), "c": (1, None)}
    values[3] = Path("x")
    found = plain(values)
    assert found == {"a": 0.5, "b": 2, "c": [1, None], "3": "x"}
    folder = opened(tmp_path / "run")
    folder.write_result(values, torch.ones(()))
    assert read_result(tmp_path / "run") == {"metrics": found, "return_value": 1.0}
    assert json.loads(json.dumps(found)) == found
