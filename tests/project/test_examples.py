"""The examples run without a cluster as documented, and stay short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holdfast_service.job_model.job_spec import parse

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "spirals"


@pytest.mark.seconds
def test_the_example_of_the_tutorial_runs_under_plain_python() -> None:
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    (command,) = re.findall(r"^python (examples/\S+\.py) --steps 20$", tutorial, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, command, "--steps", "3", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3


def test_the_elastic_example_has_a_mesh_on_every_number_of_nodes() -> None:
    document = yaml.safe_load((ROOT / "examples" / "elastic-lm.yaml").read_text())
    assert [shape.world_size for shape in parse(document, None).shapes] == [6, 4]


def test_the_vision_example_is_a_valid_job() -> None:
    document = yaml.safe_load((ROOT / "examples" / "image-vit.yaml").read_text())
    spec = parse(document, None)
    assert spec.model.positions == 64
    assert spec.parallel.world_size == 4


def test_the_example_is_short_and_its_job_is_valid() -> None:
    assert len((EXAMPLE / "train.py").read_text().splitlines()) < 60
    document = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    assert document["code"] == "."  # the CLI uploads the folder and submits its digest instead
    spec = parse({**document, "code": "sha256:" + "0" * 64}, None)
    assert spec.function == "train:main"
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    shown, *_ = re.findall(r"```yaml\n(.*?)```", tutorial, re.DOTALL)
    assert yaml.safe_load(shown) == document
