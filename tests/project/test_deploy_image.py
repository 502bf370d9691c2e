"""The image's steps make an installation of the lock alone, which runs for users who are not root.

There is no container engine in the tests: the steps of `deploy/Dockerfile` are a script, which here
fills a folder of this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pathspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.base_installation import project

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STEPS = DEPLOY / "image/steps.sh"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
EXTRAS = re.findall(r'^ARG EXTRAS="(.*)"$', DOCKERFILE, re.M)[0].split()
USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
DOCTOR = "holdfast doctor --json || test $? = 8"
UNTIL_READY = """
import subprocess, sys
from tests.support.waiting import eventually

ready, command = sys.argv[1], sys.argv[2:]
child = subprocess.Popen(command)
try:
    def answers():
        assert child.poll() is None, f"ended with {child.returncode}"
        return subprocess.run(["sh", "-c", ready]).returncode == 0

    eventually(answers, 120)
finally:
    child.terminate()
    print("ended with", child.wait(60))
"""


@pytest.fixture(scope="module")
def packages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packages", DEPLOY / "image/packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    command = [program, str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_labels_of_an_image_name_the_version_of_the_project() -> None:
    assert re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.M) == [project()["version"]]


def test_the_context_of_the_build_has_what_the_steps_need() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    ignored = pathspec.PathSpec.from_lines("gitignore", lines)
    sources = [
        *(path for part in ("api", "service", "workers") for path in (ROOT / part).rglob("*.py")),
        *(ROOT / "api/dashboard/src").rglob("*.ts*"),
        *(ROOT / name for name in ("api/dashboard/package-lock.json", "api/openapi.json")),
        *(ROOT / name for name in ("examples/stdlib-lm.yaml", "examples/elastic-lm.yaml")),
        *(ROOT / name for name in ("pyproject.toml", "requirements.lock", "README.md")),
        *(DEPLOY / "image").iterdir(),
    ]
    kept = [path for path in sources if not {"node_modules", "__pycache__"} & set(path.parts)]
    missing = [str(path) for path in kept if ignored.match_file(str(path.relative_to(ROOT)))]
    assert missing == []
    for name in (".git/config", ".venv/bin/python", "tests/conftest.py", "deploy/compose.yaml"):
        assert ignored.match_file(name), name
    assert ignored.match_file("api/dashboard/node_modules/vite/package.json")


def test_an_image_has_the_packages_of_run_time_and_none_of_tests(packages: ModuleType) -> None:
    found = names(packages.requirements(EXTRAS))
    extras = project()["optional-dependencies"]
    needed = names(project()["dependencies"]) | names(extras["server"]) | names(extras["workers"])
    assert needed - {"holdfast-train"} <= found <= packages.read_lock(packages.LOCK).keys()
    tests = names(extras["dev"]) - names([text for each in EXTRAS for text in extras[each]])
    assert found.isdisjoint(tests)
    with pytest.raises(SystemExit, match="no extra 'sever'"):
        packages.requirements(["sever"])


def test_packages_that_no_lock_names_are_found(
    packages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {**packages.read_lock(packages.LOCK), **packages.read_lock(packages.CUDA_LOCK)}
    right = {name: f"{version}+cu130" for name, version in ours.items()}
    right |= {"Holdfast.Train": "0", "pip": "1"}
    wrong = {"nvidia_cuda.cupti": "0.1", "httpx": "0.1", "left-pad": "1.0"}
    present = [SimpleNamespace(name=key, version=each) for key, each in (right | wrong).items()]
    monkeypatch.setattr(packages, "distributions", lambda: present)
    assert set(packages.unlocked()) == {
        "nvidia-cuda-cupti 0.1",
        "httpx 0.1",
        "left-pad 1.0",
    }


def test_the_lock_for_cuda_is_that_of_the_locked_torch(packages: ModuleType) -> None:
    ours, cuda = packages.read_lock(packages.LOCK), packages.read_lock(packages.CUDA_LOCK)
    first = packages.CUDA_LOCK.read_text().splitlines()[0]
    assert first == f"# torch=={ours['torch']}", "run deploy/image/packages.py cuda"
    assert ours.keys().isdisjoint(cuda)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users can read, on a short path for the sockets of Ray."""
    made = Path(tempfile.mkdtemp(prefix="hf-image-", dir="/tmp"))
    made.chmod(0o755)
    home = made / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def python() -> str:
    """A Python of this version that another user can run."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"):
        pytest.skip("needs root, setpriv and unshare to become another user")
    test = f"import ensurepip, sys; assert sys.version_info[:2] == {sys.version_info[:2]}"
    for candidate in ("/usr/local/bin/python3", "/usr/bin/python3", sys.executable):
        command = [*USER, candidate, "-c", test]
        if subprocess.run(command, capture_output=True, timeout=60).returncode == 0:
            return candidate
    pytest.skip("no Python of this version can be run by another user")


def environment(folder: Path, python: str) -> dict[str, str]:
    paths = (str(folder / "venv/bin"), str(Path(python).parent), "/usr/bin", "/bin")
    keep = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    names = {
        "HOME": str(folder / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    return {**keep, **names, "PATH": ":".join(paths), "LANG": "C.UTF-8"}


def run(command: list[Any], env: dict[str, str], timeout_s: float) -> str:
    """What it writes to stdout; it runs in a PID namespace, which ends all that it leaves."""
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *map(str, command)]
    done = subprocess.run(
        alone, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def installed(folder: Path, python: str) -> dict[str, str]:
    """The variables of a user of an installation of the wheel, with the packages of this
    environment in place of those that the steps would download."""
    site = sysconfig.get_path("purelib")
    if subprocess.run([*USER, "ls", site], capture_output=True).returncode != 0:
        pytest.skip("another user cannot read the packages of this environment")
    env = environment(folder, python)
    run([python, "-m", "venv", "--without-pip", folder / "venv"], env, 60)
    (own,) = (folder / "venv/lib").glob("python*/site-packages")
    (own / "packages.pth").write_text(f"{site}\n")
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "wheel"]
    run(wheel, dict(os.environ), 60)
    assert run([STEPS, "holdfast", folder / "venv", folder / "wheel"], env, 90).strip()
    return env


@pytest.mark.cluster
def test_the_commands_and_the_server_of_the_wheel_run_as_another_user(
    installed: dict[str, str], folder: Path, unused_tcp_port: int
) -> None:
    where = "import holdfast, holdfast_service, holdfast_workers as w; print(holdfast.__file__)"
    assert run([*USER, "python", "-c", where], installed, 60).startswith(f"{folder}/venv/")
    doctor = run([*USER, "sh", "-c", DOCTOR], installed, 120)
    results = {each["what"]: each for each in map(json.loads, doctor.splitlines())}
    assert results["packages"]["grade"] == "good", results["packages"]
    with pytest.raises(AssertionError, match="HOLDFAST_RAY_ADDRESS: is HOST:PORT of the head"):
        run([*USER, "holdfast-server"], installed, 60)
    serve_as_another_user(installed, unused_tcp_port)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_steps_fill_an_empty_folder_that_serves_as_another_user(
    folder: Path, python: str, unused_tcp_port_factory: Any
) -> None:
    env = environment(folder, python)
    venv = folder / "venv"
    run([STEPS, "packages", venv], {**env, "EXTRAS": " ".join(EXTRAS), "VARIANT": "cpu"}, 900)
    run([STEPS, "wheel", venv, folder / "wheel"], env, 600)
    run([STEPS, "holdfast", venv, folder / "wheel"], env, 120)
    run([STEPS, "sbom", venv, folder / "sbom.json"], env, 300)
    bill = json.loads((folder / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {canonicalize_name(each["name"]) for each in bill["components"]}
    assert {"ray", "torch", "fastapi"} <= listed
    assert listed.isdisjoint({"pytest", "mypy", "ruff", "hypothesis", "moto"})

    run([*USER, "sh", "-c", DOCTOR], env, 120)
    serve_as_another_user(env, unused_tcp_port_factory())
    port = unused_tcp_port_factory()
    start = ["ray", "start", "--head", "--block", f"--port={port}", "--include-dashboard=false"]
    start += [f"--temp-dir={folder}/home/ray", "--num-cpus=1", "--object-store-memory=80000000"]
    start += ["--dashboard-agent-listen-port=0"]
    # Its status after SIGTERM is Ray's own: 1.
    until_ready(f"ray health-check --address 127.0.0.1:{port}", start, env)


def serve_as_another_user(env: dict[str, str], port: int) -> None:
    ready = f"http://127.0.0.1:{port}/readyz"
    ask = f"python -c \"import urllib.request as r; r.urlopen('{ready}')\" 2>/dev/null"
    serve = ["holdfast", "serve", "--port", str(port), "--local-nodes", "1"]
    assert until_ready(ask, serve, env) == 0


def until_ready(ready: str, command: list[str], env: dict[str, str]) -> int:
    """The exit status of the command, which gets SIGTERM once the command `ready` succeeds."""
    beside = {**env, "PYTHONPATH": str(ROOT)}
    output = run([*USER, "python", "-c", UNTIL_READY, ready, *command], beside, 300)
    return int(output.rpartition("ended with ")[2])
