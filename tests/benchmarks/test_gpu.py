"""The check of a GPU: a part that fails, hangs or dies costs its own figures only."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import NoReturn

import pytest
from benchmarks.gpu_parts import training
from benchmarks.gpu_parts.figures import GpuResult, Setting
from benchmarks.gpu_parts.processes import PartFailed, run_part

from benchmarks import gpu
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.spec import BYTE_VOCABULARY

PATIENCE_S = 60.0


def broken() -> NoReturn:
    raise ValueError("the sum is wrong")


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def endless() -> NoReturn:
    while True:
        time.sleep(60)


def test_a_part_runs_in_a_process_of_its_own() -> None:
    assert run_part(os.getpid, PATIENCE_S) != os.getpid()


def test_a_part_that_raises_dies_or_hangs_says_so() -> None:
    for part, deadline_s, why in (
        (broken, PATIENCE_S, r"ValueError: the sum is wrong \(.*broken"),
        (killed, PATIENCE_S, "without an answer .*-9"),
        (endless, 0.3, "did not end within 0 s"),
    ):
        with pytest.raises(PartFailed, match=why):
            run_part(part, deadline_s)


def test_the_other_parts_go_on_and_what_was_left_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = gpu.Part("ranks:no_such_function", PATIENCE_S)
    monkeypatch.setattr(gpu, "PARTS", {**gpu.PARTS, "kill": kill})
    result = gpu.measure(
        Setting("cpu", True, tmp_path, tmp_path), ["kill", "communicator", "nvml"], 60.0
    )
    assert result.communicator is not None and result.kill is None
    assert set(result.errors) == {"kill"} and "no_such_function" in result.errors["kill"]
    assert set(result.left_out) == set(gpu.PARTS) - {"kill", "communicator"}


def test_every_part_has_its_figures_and_all_fit_into_ten_minutes() -> None:
    assert gpu.PARTS.keys() <= {field.name for field in fields(GpuResult)}
    assert gpu.BUDGET_S < 600
    assert all(part.deadline_s < gpu.BUDGET_S for part in gpu.PARTS.values())


def test_the_measured_model_has_a_billion_parameters(tmp_path: Path) -> None:
    spec = training.training_spec(
        Setting("cuda:0", False, tmp_path, tmp_path), training.LARGE, 1, 3
    )
    shapes = parameter_shapes(spec.model, BYTE_VOCABULARY)
    count = sum(prod(shape) for shape in shapes.values())
    assert count > training.LEAST_PARAMETERS
    assert spec.model.dtype == "bfloat16"
