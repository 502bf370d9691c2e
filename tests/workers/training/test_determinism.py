"""`train.deterministic`: what it sets, in which processes, and that the CPU's bits are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.nodes.agent_config import agent_config

from holdfast_workers.ipc.children import ChildProcesses, ZygoteFailed
from holdfast_workers.training.determinism import KernelChoice, advice, kernel_choice

WAIT_S = 60.0
STEPS = 4
JOB: dict[str, Any] = {
    "model": {"dim": 32, "layers": 2, "heads": 2, "sequence_length": 32, "dropout": 0.1},
    "train": {"global_batch": 4, "micro_batch": 2},
}
REPORTS = """
import torch
raise RuntimeError(f"algorithms {torch.are_deterministic_algorithms_enabled()}, "
                   f"warns {torch.is_deterministic_algorithms_warn_only_enabled()}")
"""


def test_strict_raises_on_accelerators_and_warns_on_the_cpu_and_fast_sets_nothing() -> None:
    on_device = kernel_choice("strict", "cuda:0")
    assert on_device.algorithms and on_device.cudnn and not on_device.only_warn
    assert on_device.variables == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert kernel_choice("strict", "cpu") == KernelChoice(algorithms=True, only_warn=True)
    assert kernel_choice("fast", "cpu") == kernel_choice("fast", "cuda:0") == KernelChoice()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mode", "set_"), [("strict", "algorithms True, warns True"), ("fast", "algorithms False")]
)
def test_ranks_get_it_from_their_zygote_before_users_code_runs(
    tmp_path: Path, mode: str, set_: str
) -> None:
    (tmp_path / "reporting.py").write_text(REPORTS)
    config = agent_config(
        tmp_path,
        training={"train": {"deterministic": mode}, "recipe": "reporting:Recipe"},
        code=str(tmp_path),
    )
    processes = ChildProcesses(config.zygote_config, WAIT_S, WAIT_S)
    try:
        with pytest.raises(ZygoteFailed, match=set_):
            processes.start()
    finally:
        processes.stop()


def test_an_operation_that_strict_refuses_is_answered_with_advice() -> None:
    pooled, indices = torch.nn.functional.max_pool2d(torch.rand(1, 1, 4, 4), 2, return_indices=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as refused:
            torch.nn.functional.max_unpool2d(pooled, indices, [2, 2])
    finally:
        torch.use_deterministic_algorithms(False)
    assert "train.deterministic: fast" in advice(refused.value)
    assert advice(RuntimeError("CUDA out of memory")) == ""


@pytest.mark.slow
def test_on_the_cpu_strict_and_fast_give_the_same_bits(tmp_path: Path) -> None:
    strict, fast = digests(tmp_path, "strict"), digests(tmp_path, "fast")
    assert len(strict) == STEPS and strict == fast


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_strict_repeats_its_bits(tmp_path: Path) -> None:
    first, second = (digests(tmp_path, "strict", device="cuda", dtype="bfloat16") for _ in "ab")
    assert len(first) == STEPS and first == second


def digests(folder: Path, mode: str, *, device: str = "cpu", dtype: str = "float32") -> list[str]:
    """Digests of the state after each step of a run in a process of its own."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.txt").write_text("Bits of one run are the bits of the next. " * 200)
    path, out = folder / f"{mode}.yaml", folder / f"{mode}.jsonl"
    data = {"source": str(folder / "text")}
    train = {**JOB["train"], "deterministic": mode}
    model = {**JOB["model"], "dtype": dtype}
    path.write_text(yaml.safe_dump({"model": model, "data": data, "train": train}))
    options = ("--steps", str(STEPS), "--json", str(out), "--device", device)
    command = [sys.executable, "-m", "holdfast_workers.standalone", str(path), *options]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--cache-dir", str(folder / "cache")]
    subprocess.run(command, env=environ, check=True, timeout=WAIT_S, capture_output=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [line["digest"]["hex"] for line in lines if line.get("digest", {}).get("step")]
