"""The folder of a run counts a checkpoint wholly or not at all, and keeps what is configured."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

FILES = ("state", "more")
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
    for file in FILES:
        (part / file).write_text(f"report {index}")
    folder.add_part(part, index)
    folder.commit(index, name or f"checkpoint_{index}", {"score": float(index)})


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
    (path / "checkpoint_2").mkdir()  # named by an attempt that ended before it counted
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


class _Killed(BaseException):
    pass


def comes_to_its_end(
    monkeypatch: pytest.MonkeyPatch, operation: int, work: Callable[[], object]
) -> bool:
    """False if `work` was killed before its n-th change of the file system."""
    count = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= operation:
                raise _Killed
            return original(*args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in ("mkdir", "replace", "rename", "unlink", "remove", "rmdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except _Killed:
            return False
    return True


def kills(
    monkeypatch: pytest.MonkeyPatch, before: Path, work: Callable[[Path], object]
) -> Iterator[Path]:
    """For every moment of `work`: a copy of the folder `before`, as it is if killed then."""
    for operation in itertools.count(1):
        path = before.with_name(f"{before.name}-{operation}")
        shutil.copytree(before, path)
        if comes_to_its_end(monkeypatch, operation, partial(work, path)):
            return
        yield path


def complete(found: Sequence[KeptCheckpoint]) -> list[int]:
    """The reports whose checkpoints a list names; each is there as it was reported."""
    for each in found:
        for file in FILES:
            assert (Path(each.path) / file).read_text() == f"report {each.index}"
        assert each.metrics == {"score": float(each.index)}
    return [each.index for each in found]


@pytest.mark.parametrize(
    ("name", "most", "again", "before"),
    [
        ("latest", 1, False, [2]),
        ("latest", None, False, [2]),
        ("latest", 1, True, [2]),
        ("", 1, False, [2]),
    ],
)
def test_a_run_killed_at_any_moment_has_a_complete_checkpoint(
    name: str,
    most: int | None,
    again: bool,
    before: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the report and in the start after it. `again`: a report is repeated."""
    path, keep = tmp_path / "run", Retention(most)
    folder = opened(path, retention=keep)
    save(folder, tmp_path, 1, name)
    save(folder, tmp_path, 2, name)
    index = 2 if again else 3
    after = [index]

    def report(path: Path) -> None:
        save(opened(path, 2, keep), tmp_path, index, name)

    found = set()
    for killed in kills(monkeypatch, path, report):
        assert complete(read_list(killed)) in (before, after)
        for twice in kills(monkeypatch, killed, opened):
            assert complete(read_list(twice)) in (before, after)
            last = opened(twice, 4, keep)
            found.add(tuple(complete(last.saved)))
            assert all(each.path.endswith(name) for each in last.saved)
            save(last, tmp_path, 3, name)
            assert complete(last.saved)[-1] == 3
            assert not [each for each in twice.iterdir() if each.name.startswith(".")]
    assert found == {tuple(before), tuple(after)}


def test_a_name_that_cannot_be_given_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt goes on: the checkpoint counts where it is until another gets the name."""
    folder = opened(tmp_path / "run")
    save(folder, tmp_path, 1, "same")
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        original = os.replace

        def replaced(source: Any, target: Any) -> None:
            if Path(target).name == "same":
                raise PermissionError(source)
            original(source, target)

        patch.setattr(os, "replace", replaced)
        save(folder, tmp_path, 2, "same")
    assert complete(folder.saved) == complete(read_list(folder.path)) == [2]
    save(folder, tmp_path, 3, "same")
    assert complete(folder.saved) == complete(opened(folder.path, 2).saved) == [3]


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
