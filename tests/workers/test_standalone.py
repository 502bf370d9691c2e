"""The training core runs alone, as one process and under torchrun, with the same curve."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.checkpoint.published_models import prepared_model, write_folder
from tests.support.data.token_sets import MadeSet, random_shards

from holdfast_workers.published.weight_files import UnfitWeights
from holdfast_workers.spec import DataSpec, ModelSpec, SourceSpec, find_faults
from holdfast_workers.standalone import load_spec, main
from holdfast_workers.training.mfu import flops_per_token, peak_flops

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml"


def small_job(folder: Path) -> Path:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    job = {
        "name": "small",
        "model": {"dim": 32, "layers": 1, "heads": 2, "sequence_length": 16},
        "data": {"source": str(folder / "text.txt")},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2},
        "parallel": {"dp_shard": 2},
        "resources": {"gpus_per_worker": 0},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run(folder: Path, launcher: list[str], name: str) -> list[dict[str, Any]]:
    out = folder / name
    command = [
        *launcher,
        "-m",
        "holdfast_workers.standalone",
        str(folder / "job.yaml"),
        "--json",
        str(out),
        "--cache-dir",
        str(folder / "cache"),
        "--device",
        "cpu",
        "--steps",
        "3",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.seconds
def test_prepared_token_sets_are_fetched_and_published_weights_read(tmp_path: Path) -> None:
    prepared = MadeSet("web", random_shards(1, [300, 200])).store(tmp_path / "store")
    job = yaml.safe_load(small_job(tmp_path).read_text())
    data = DataSpec(sources=(SourceSpec(path="/web"),))
    made = prepared.model_copy(update={"origin": data.origin_of(data.sources[0])})
    job["data"] = data.model_copy(update={"prepared": (made,)}).model_dump(mode="json")
    write_folder(tmp_path / "model")
    model = prepared_model(tmp_path / "model", tmp_path / "weights", sequence_length=16)
    job["model"] = model.model_dump(mode="json")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    lines = run(tmp_path, [sys.executable], "alone")
    assert lines[-1]["summary"]["steps"] == 3
    assert math.isfinite(lines[-1]["summary"]["loss"])


def test_a_published_model_that_no_server_has_prepared_is_refused(tmp_path: Path) -> None:
    job = yaml.safe_load(small_job(tmp_path).read_text())
    job["model"], job["data"] = {"from": "/models/tiny"}, {"sources": [{"path": "/web"}]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(UnfitWeights, match=r"^model\.from is not prepared: the server does so"):
        main([str(tmp_path / "job.yaml"), "--cache-dir", str(tmp_path), "--steps", "3"])


@pytest.mark.slow
def test_one_process_and_torchrun_follow_one_curve(tmp_path: Path) -> None:
    small_job(tmp_path)
    alone = run(tmp_path, [sys.executable], "alone")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    together = run(tmp_path, torchrun, "together")
    losses = [
        [line["row"]["loss"] for line in lines if "row" in line] for lines in (alone, together)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for lines in (alone, together):
        digests = [line["digest"]["step"] for line in lines if "digest" in line]
        assert digests == [0, 1, 2, 3]
        assert lines[-1]["summary"]["steps"] == 3


def test_the_example_job_spec_has_no_faults() -> None:
    spec = load_spec(EXAMPLE, steps=None, world_size=4)
    assert find_faults(spec) == []
    assert spec.parallel.mesh == {"dp_shard": 2, "tp": 2}
    assert spec.train.steps == 300


def test_one_process_runs_any_mesh_and_fewer_steps() -> None:
    spec = load_spec(EXAMPLE, steps=5, world_size=1)
    assert spec.parallel.world_size == 1
    assert (spec.train.steps, spec.train.schedule.warmup_steps) == (5, 5)


def test_invalid_fields_are_named_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_job(tmp_path)
    job = yaml.safe_load(path.read_text())
    job["train"] = {"epochs": "many", "seed": -1}
    path.write_text(yaml.safe_dump(job))
    assert main([str(path)]) == 2
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "train.epochs",
        "train.seed",
    ]


def test_a_world_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 processes, not 3"):
        load_spec(EXAMPLE, steps=None, world_size=3)


def test_flops_and_peaks() -> None:
    spec = ModelSpec(dim=64, layers=2, heads=4, sequence_length=128)
    assert flops_per_token(100_000, spec) == 6 * (100_000 - 256 * 64) + 12 * 2 * 64 * 128
    wide = ModelSpec(dim=64, layers=2, heads=4, head_size=32, vocabulary=500, sequence_length=128)
    windowed = wide.model_copy(update={"sliding_window": 16, "window_from": 1})
    assert flops_per_token(100_000, wide, 500) == 6 * (100_000 - 500 * 64) + 12 * 2 * 128 * 128
    saved = flops_per_token(100_000, wide, 500) - flops_per_token(100_000, windowed, 500)
    assert saved == 12 * 128 * (128 - 16)
    sizes = {"image_size": 32, "patch_size": 8, "classes": 160}
    images = ModelSpec.model_validate({"family": "vit", "dim": 64, "layers": 2, **sizes})
    block, patch = 12 * 64 * 64, 3 * 8 * 8  # multiplications for a patch
    parameters = 2 * block + (patch + 16 + 160) * 64
    forward = 2 * (2 * block + patch * 64 + 160 / 16 * 64 + 2 * 2 * 16 * 64)
    assert flops_per_token(parameters, images) == pytest.approx(3 * forward)
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("something else") is None
