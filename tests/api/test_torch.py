"""`holdfast.torch` outside of Holdfast: the same program runs, and keeps nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.torch import tier

WAIT_S = 60.0


def test_nothing_is_kept_and_nothing_is_found_outside_of_holdfast(tmp_path: Path) -> None:
    kept = tier()
    state = {"weights": torch.ones(3)}
    assert not kept.active
    assert kept.newest() is None
    dcp.save(state, storage_writer=kept.at(1))
    saving = dcp.async_save(state, storage_writer=kept.at(2))
    assert not isinstance(saving, dcp.state_dict_saver.AsyncSaveResponse)
    saving.result(WAIT_S)
    assert not kept.save(3, state)
    assert kept.load() is None
    assert not kept.save_folder(4, tmp_path)
    assert kept.load_folder(tmp_path) is None
    assert kept.newest() is None
    assert kept.group is None
    assert list(tmp_path.iterdir()) == []


def test_a_load_of_what_was_not_kept_says_so() -> None:
    with pytest.raises(CheckpointException, match=r"only if tier\.newest"):
        dcp.load({"weights": torch.ones(3)}, storage_reader=tier().at(1))


def test_a_folder_takes_its_place_where_the_user_names_one(tmp_path: Path) -> None:
    kept = tier(fallback=tmp_path)
    for step in (9, 10):
        dcp.save({"weights": torch.full((3,), float(step))}, storage_writer=kept.at(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-9"]
    (tmp_path / "step-11").mkdir()  # not complete
    again = tier(fallback=tmp_path)
    assert again.newest() == 10
    state = {"weights": torch.zeros(3)}
    dcp.load(state, storage_reader=again.at(10))
    assert state["weights"].tolist() == [10.0] * 3


def test_an_attachment_outside_of_holdfast_is_inactive_and_light() -> None:
    assert not holdfast.attach().active
    program = "import sys, holdfast; holdfast.attach(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S).returncode == 0
