"""The client from a wheel, in an environment without torch and Ray, with a server elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from tests.end_to_end.conftest import ONE_NODE, REPOSITORY, Product, served, spec
from tests.support.base_installation import with_dependencies

from holdfast.cli.exit_codes import ExitCode
from holdfast_service.extras import DISTRIBUTION, SERVER_PACKAGES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
DASHBOARD = "holdfast/dashboard/index.html"
STEPS = 20


@dataclass(frozen=True)
class LightInstallation:
    """A virtual environment with the wheel and its base dependencies; nothing else."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, as a user elsewhere runs it."""
        program, *arguments = command
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.environ["PATH"], **env},
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    subprocess.run([*PIP, "wheel", *offline, "-w", str(folder), str(REPOSITORY)], check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("product"), nodes=1) as started:
        yield started


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> LightInstallation:
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    found = LightInstallation(folder)
    into = (*PIP, "--python", str(found.python))
    subprocess.run([*into, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (installed,) = distributions(path=[str(packages)])
    link_dependencies(installed, packages)
    subprocess.run([*into, "check"], check=True)
    return found


def link_dependencies(installed: Distribution, packages: Path) -> None:
    """Make the base dependencies importable: the distributions that the tests use, by links."""
    needed: Sequence[str] = [
        text
        for text in installed.requires or ()
        if (marker := Requirement(text).marker) is None or marker.evaluate({"extra": ""})
    ]
    for dependency in with_dependencies(needed).values():
        tops = {file.parts[0] for file in dependency.files or ()} - {"..", "__pycache__"}
        for top in tops:
            (packages / top).symlink_to(Path(str(dependency.locate_file(top))))


def test_the_wheel_contains_the_packages_and_the_dashboard_if_it_is_built(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith(f"{DISTRIBUTION.replace('-', '_')}-")
    for package in ("holdfast", "holdfast_service", "holdfast_workers"):
        assert f"{package}/py.typed" in names
    for example in ("stdlib-lm", "elastic-lm"):
        assert f"holdfast/demo/{example}.yaml" in names
    assert (DASHBOARD in names) == (REPOSITORY / "api" / DASHBOARD).exists()
    others = {name.split("/")[0] for name in names if not name.startswith("holdfast")}
    assert others == set()


def test_the_command_reports_the_version_of_the_wheel(
    light: LightInstallation, wheel: Path
) -> None:
    assert light.run("holdfast", "--version").stdout.strip() == wheel.name.split("-")[1]


def test_the_environment_has_no_package_of_the_server(light: LightInstallation) -> None:
    for name in SERVER_PACKAGES:
        assert f"No module named '{name}'" in light.run("python", "-c", f"import {name}").stderr


def test_a_job_is_submitted_and_followed_from_a_light_installation(
    light: LightInstallation, product: Product, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 2}
    job.write_text(yaml.safe_dump(spec(**ONE_NODE, name="light", train=train)))
    at_server = {"HOLDFAST_DATA_DIR": str(product.data_dir)}
    followed = light.run("holdfast", "submit", str(job), "--follow", **at_server)
    assert followed.returncode == ExitCode.OK, followed.stderr
    last = followed.stdout.splitlines()[-1]
    assert "SUCCEEDED" in last, followed.stdout
    assert f"step {STEPS:>4}/{STEPS}" in followed.stdout
    (stored,) = product.client.list(name="light")
    assert (stored.state, stored.step) == ("SUCCEEDED", STEPS)
    described = light.run("holdfast", "describe", "light", "-o", "yaml", **at_server)
    assert yaml.safe_load(described.stdout)["job"]["state"] == "SUCCEEDED", described.stderr


def test_serve_says_what_to_install(light: LightInstallation) -> None:
    refused = light.run("holdfast", "serve")
    assert refused.returncode == ExitCode.USAGE
    assert f"pip install '{DISTRIBUTION}[server]'" in refused.stderr
    assert "Traceback" not in refused.stderr
