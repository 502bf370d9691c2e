"""A job's packages are really installed by pip, from a folder of wheels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.support.wheels import make_wheel, only_from

from holdfast_workers.ipc import linux_processes
from holdfast_workers.packages.folders import packages_folder
from holdfast_workers.packages.installation import (
    COMPLETE,
    PackagesFailed,
    install,
    resolve,
)

LIMIT_S = 60.0
GO_ON = threading.Event()


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    make_wheel(folder, "hf_first", "1.0")
    make_wheel(folder, "hf_first", "2.0", needs=["hf_second>=1", "numpy"])
    make_wheel(folder, "hf_second", "1.5")
    for name, value in only_from(folder).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def run(modules: Path, program: str) -> str:
    """What a program prints that enters the packages."""
    text = f"from holdfast_workers.packages.folders import enter; enter({str(modules)!r})\n"
    command = [sys.executable, "-c", text + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout


@pytest.mark.slow
def test_versions_are_found_without_what_the_node_has_and_installed_exactly(cache: Path) -> None:
    pins = resolve(["hf-first"], cache, LIMIT_S, GO_ON)
    assert pins == ("hf_first==2.0", "hf_second==1.5")  # and not numpy, which all nodes have
    modules = install(("hf_first==1.0",), cache, LIMIT_S, GO_ON)
    assert run(modules, "import hf_first; print(hf_first.VERSION)") == "1.0\n"
    other = install(pins, cache, LIMIT_S, GO_ON)
    assert run(other, "import hf_first, hf_second; print(hf_first.VERSION)") == "2.0\n"
    assert not list((cache / "packages").glob("resolve-*"))


@pytest.mark.seconds
def test_packages_are_seen_by_programs_that_a_rank_starts(cache: Path) -> None:
    modules = install(("hf_second==1.5",), cache, LIMIT_S, GO_ON)
    program = (
        "import subprocess, sys\n"
        "for python in (sys.executable, 'python'):\n"
        "    subprocess.run([python, '-c', 'import hf_second, numpy; print(hf_second.VERSION)'])"
    )
    assert run(modules, program) == "1.5\n1.5\n"


@pytest.mark.seconds
def test_a_package_of_the_node_gives_way_unless_torch_or_holdfast_need_it(
    cache: Path, wheels: Path
) -> None:
    make_wheel(wheels, "hypothesis", "0.1", "VERSION = 'the job has another'")
    pins = resolve(["hypothesis<1"], cache, LIMIT_S, GO_ON)
    modules = install(pins, cache, LIMIT_S, GO_ON)
    assert run(modules, "import hypothesis; print(hypothesis.VERSION)") == "the job has another\n"
    with pytest.raises(PackagesFailed, match=r"The node keeps numpy=="):
        resolve(["numpy<1"], cache, LIMIT_S, GO_ON)
    assert metadata.version("numpy") > "1"


@pytest.mark.seconds
def test_of_an_address_every_node_installs_the_bytes_that_the_first_one_found(
    cache: Path, wheels: Path
) -> None:
    wheel = make_wheel(wheels, "hf_third", "1.0", "VERSION = 'as found'")
    (pin,) = resolve([f"hf_third @ {wheel.as_uri()}"], cache, LIMIT_S, GO_ON)
    make_wheel(wheels, "hf_third", "1.0", "VERSION = 'replaced since'")
    with pytest.raises(PackagesFailed, match="DO NOT MATCH THE HASHES"):
        install((pin,), cache, LIMIT_S, GO_ON)


def test_no_pin_becomes_another_line_for_pip(cache: Path, tmp_path: Path) -> None:
    """Pins have addresses that other packages name as their needs."""
    secret = tmp_path / "secret"
    secret.write_text("the very secret")
    for pin in (f"x @ file:///x.whl\u2028--requirement={secret}", "x @ https://h/${HOME}"):
        with pytest.raises(PackagesFailed, match="is not a requirement such as") as refused:
            install((pin,), cache, LIMIT_S, GO_ON)
        assert "the very secret" not in str(refused.value)


def test_a_package_that_does_not_exist_is_named(cache: Path) -> None:
    with pytest.raises(PackagesFailed, match="No matching distribution found for hf-none"):
        resolve(["hf-none"], cache, LIMIT_S, GO_ON)


def test_what_is_there_already_is_not_installed_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = install(("hf_second==1.5",), cache, LIMIT_S, GO_ON)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert install(("hf_second==1.5",), cache, LIMIT_S, GO_ON) == modules


def test_an_interrupted_installation_is_done_again(cache: Path) -> None:
    modules = packages_folder(("hf_second==1.5",), cache)
    modules.mkdir(parents=True)
    (modules / "hf_second.py").write_text("half of ")
    installed = install(("hf_second==1.5",), cache, LIMIT_S, GO_ON)
    assert installed == modules
    assert run(modules, "import hf_second; print(hf_second.VERSION)") == "1.5\n"


def test_of_two_processes_one_installs_and_the_other_waits(cache: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path\n"
        "from holdfast_workers.packages.installation import install\n"
        f"print(install(('hf_second==1.5',), Path({str(cache)!r}), 60, threading.Event()))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)
    ]
    printed = {process.communicate(timeout=LIMIT_S)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert printed == {f"{packages_folder(('hf_second==1.5',), cache)}\n".encode()}


def make_slow(wheels: Path, marker: Path) -> str:
    """A package whose build never ends; it writes its process id into `marker`."""
    folder = wheels.parent / "slow"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(
        "import os, time\n"
        "def prepare_metadata_for_build_wheel(*given):\n"
        f"    open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    return f"slow @ {folder.as_uri()}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deadline", "stop"])
def test_an_installation_that_takes_too_long_or_is_not_wanted_ends_with_its_programs(
    cache: Path, wheels: Path, tmp_path: Path, how: str
) -> None:
    slow, marker, stop = make_slow(wheels, tmp_path / "pid"), tmp_path / "pid", threading.Event()
    limit_s = 5.0 if how == "deadline" else LIMIT_S

    def stop_it() -> None:
        eventually(marker.exists, LIMIT_S)
        stop.set()

    if how == "stop":
        threading.Thread(target=stop_it).start()
    expected = "did not finish within 5 s: see timeouts.install_s" if how == "deadline" else "stop"
    with pytest.raises(PackagesFailed, match=expected) as failed:
        resolve([slow], cache, limit_s, stop)
    assert str(cache) not in str(failed.value)
    if marker.exists():  # a busy machine may not have begun the build before the deadline
        eventually(lambda: not linux_processes.is_alive(int(marker.read_text())))


def test_pip_ends_with_the_process_that_runs_it(cache: Path, wheels: Path, tmp_path: Path) -> None:
    slow, marker = make_slow(wheels, tmp_path / "pid"), tmp_path / "pid"
    program = (
        "import threading; from pathlib import Path\n"
        "from holdfast_workers.packages.installation import resolve\n"
        f"resolve([{slow!r}], Path({str(cache)!r}), 60, threading.Event())"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    eventually(lambda: marker.exists() and marker.read_text(), LIMIT_S)
    build = int(marker.read_text())
    pip = Path(f"/proc/{build}/stat").read_text().rpartition(")")[2].split()[1]  # its parent
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        eventually(lambda: not linux_processes.is_alive(int(pip)))
    finally:
        os.killpg(os.getpgid(build), signal.SIGKILL)


def test_pip_gets_no_password_but_those_of_the_index(
    cache: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the bucket")
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    slow = make_slow(wheels, tmp_path / "pid")
    backend = wheels.parent / "slow" / "backend.py"
    shown = tmp_path / "shown"
    backend.write_text(
        "import os\n"
        "def prepare_metadata_for_build_wheel(*given):\n"
        f"    open({str(shown)!r}, 'w').write(repr(dict(os.environ)))\n"
        "    raise SystemExit(3)\n"
    )
    with pytest.raises(PackagesFailed):
        resolve([slow], cache, LIMIT_S, GO_ON)
    assert "PIP_TIMEOUT" in shown.read_text()
    assert "of the bucket" not in shown.read_text()


@pytest.mark.slow
def test_nothing_is_asked_of_an_index_for_what_the_node_has(cache: Path) -> None:
    assert resolve(["numpy"], cache, LIMIT_S, GO_ON) == ()
    pins = resolve(["pytest-timeout"], cache, LIMIT_S, GO_ON)
    assert f"pytest-timeout=={metadata.version('pytest-timeout')}" in pins  # others may lack it
    assert install((), cache, LIMIT_S, GO_ON).is_dir()


@pytest.mark.seconds
def test_packages_that_no_process_has_used_for_long_are_removed(cache: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path\n"
        "from holdfast_workers.packages.installation import install\n"
        f"install((sys.argv[1],), Path({str(cache)!r}), 60, threading.Event())\n"
        "print('installed', flush=True); sys.stdin.read()"
    )
    pins = ["hf_first==1.0", "hf_second==1.5"]
    users = [
        subprocess.Popen(
            [sys.executable, "-c", program, pin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for pin in pins
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == b"installed\n"
    unused, used = (packages_folder((pin,), cache) for pin in pins)
    for modules in (unused, used):
        os.utime(modules.parents[2] / COMPLETE, (0, 0))
    users[0].communicate()
    try:
        install((), cache, LIMIT_S, GO_ON)
        assert used.is_dir()
        assert not unused.exists()
    finally:
        users[1].communicate()
