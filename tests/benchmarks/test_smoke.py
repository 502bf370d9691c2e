"""Every benchmark runs to its end as a user starts it, with its peer's side, and its last line has
the declared keys.

torchft, a peer of `storm`, and mosaicml-streaming, one of `data`, are installed into folders of
`build`, which needs a package index once.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.api_figures import ApiResult
from benchmarks.bring import BringResult
from benchmarks.checkpoint import CheckpointResult
from benchmarks.conditions import load_job
from benchmarks.data import DataResult
from benchmarks.elastic import ELASTIC_JOB
from benchmarks.figures import OverheadResult, RecoveryResult, StormResult
from benchmarks.gpu_parts.figures import GpuResult
from benchmarks.hang_figures import DetectionResult
from benchmarks.meshes import MeshesResult
from benchmarks.resizes.changes import ElasticResult
from pydantic import TypeAdapter

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
RUN_S = 600.0
CLEAN_UP_S = 60.0
SMALL = "--job {job}"
"""A small job."""


@dataclass(frozen=True)
class Smoke:
    """The options that make a benchmark take little time, and the type of its last line. Both
    sides run: a figure may be null only if it is `lacking`."""

    options: str
    result: type
    lacking: tuple[str, ...] = ()


SMOKES = {
    "api": Smoke("--jobs 6 --clients 3 --seconds 2", ApiResult),
    "gpu": Smoke("--device cpu --small", GpuResult, lacking=("nvml",)),
    "bring": Smoke("--kills 1 --steps-between 2", BringResult),
    "meshes": Smoke("--rounds 1 --steps 1 --dim 32 --parity-meshes 1", MeshesResult),
    "detection": Smoke("--meshes 1 --kinds stop --trials 1 --healthy-steps 12", DetectionResult),
    "checkpoint": Smoke(
        "--ranks 2 --state-mb 16 --steps 20 --work 1 --tier-mb 24 --rounds 2 "
        "--reshard-mb 8 --pairs 1 --most-ranks 2",
        CheckpointResult,
    ),
    "elastic": Smoke(
        "--nodes 3 --ranks-per-node 1 --rounds 1 --settle-steps 2 --settings best "
        "--job {elastic_job} --health-failures 10",
        ElasticResult,
    ),
    "data": Smoke(
        "--text-mb 1 --vocabulary 1000 --prepare-rounds 1 --sequence-length 128 --batch 4 "
        "--warm-up 2 --steps 8 --step-s 0.01 --rounds 1 --shards 1000 --lookups 20 "
        "--mosaic-home build/mosaicml-streaming",
        DataResult,
    ),
    "overhead": Smoke(f"--rounds 1 --steps 3 --skip 1 --poll-s 0.5 {SMALL}", OverheadResult),
    "recovery": Smoke(f"--faults 1 --after-step 2 {SMALL}", RecoveryResult),
    "storm": Smoke(
        "--calm-steps 5 --storm-s 4 --torchft-s 10 --timeouts 3 --torchft-home build/torchft",
        StormResult,
        lacking=("rates.1.of_torchft",),  # in a storm so short, torchft may commit nothing
    ),
}
PARTS = {"ray_train_side": "recovery", "torchft_program": "storm"}
"""Programs that a benchmark starts."""
WITHOUT_CLUSTER = {"api", "data", "meshes"}
"""Benchmarks that start no Ray cluster, and neither kill nor stop processes."""


@pytest.fixture
def small_job(tmp_path: Path) -> Path:
    """The recovery benchmark's job on two ranks of one node, with little data."""
    job = load_job(FOLDER / "recovery.yaml")
    job["data"]["source"] = str(ROOT / "docs")
    job["train"]["schedule"]["warmup_steps"] = 1  # at most the number of steps
    job["parallel"] = {"dp_shard": 2}
    job["resources"]["standby_nodes"] = 0
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.fixture
def elastic_job(tmp_path: Path) -> Path:
    """The job of the benchmark of an elastic world, with little data."""
    job = load_job(ELASTIC_JOB)
    job["data"]["source"] = str(ROOT / "docs")
    path = tmp_path / "elastic.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_every_program_has_a_smoke_run_or_belongs_to_a_benchmark() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py") if '= "__main__"' in path.read_text()}
    assert programs == {*SMOKES, *PARTS}, "add a new benchmark to SMOKES, its parts to PARTS"
    assert set(PARTS.values()) <= set(SMOKES)


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 2 * CLEAN_UP_S)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in WITHOUT_CLUSTER else pytest.mark.chaos)
        for name in SMOKES
    ],
)
def test_a_benchmark_runs_and_its_last_line_has_the_declared_keys(
    name: str, small_job: Path, elastic_job: Path
) -> None:
    smoke = SMOKES[name]
    options = smoke.options.format(job=small_job, elastic_job=elastic_job)
    last = last_line(name, options.split())
    adapter: TypeAdapter[Any] = TypeAdapter(smoke.result)
    assert adapter.dump_python(adapter.validate_python(last), mode="json") == last
    found = dict(figures(last))
    assert not {path: value for path, value in found.items() if not 0 <= (value or 0) < math.inf}
    missing = {path for path, value in found.items() if value is None}
    assert missing <= set(smoke.lacking), "a side was left out"


def last_line(name: str, options: list[str]) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=RUN_S)
    except BaseException:
        process.send_signal(signal.SIGINT)  # it ends its cluster before it ends itself
        process.communicate(timeout=CLEAN_UP_S)
        raise
    assert process.returncode == 0, out[-3000:] + errors[-3000:]
    return json.loads(out.splitlines()[-1])


def figures(value: object, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number and every null of a JSON value, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from figures(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from figures(item, f"{path}[{index}]")
    elif value is None or isinstance(value, int | float):
        yield path, value
