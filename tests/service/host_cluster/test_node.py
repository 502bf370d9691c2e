"""The node of a machine by itself, with other programs in place of Ray."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.support.waiting import DEADLINE_S, eventually

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.embedded_cluster.processes import CLUSTER_MARK
from holdfast_service.host_cluster import node as nodes
from holdfast_service.host_cluster.endpoint import Endpoint
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.head_probe import ClusterNode, HeadAnswer
from holdfast_service.host_cluster.node_record import HostNode, NodeFiles, node_files
from holdfast_service.host_cluster.ray_command import NodeOptions, Ports
from holdfast_workers import build

MARK = f"{os.getpid():08x}"


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    found = node_files(tmp_path)
    found.make()
    return found


def recorded(files: NodeFiles, tmp_path: Path, *, head: bool = False) -> HostNode:
    """A node with folders, as if it had been started."""
    node = HostNode(
        mark=MARK,
        head=head,
        gcs="10.0.0.1:6379",
        name="a",
        address="10.0.0.2",
        temp_dir=str(tmp_path / f"holdfast-{MARK}"),
        shm_root=str(tmp_path / f"shm-{MARK}"),
        token=str(files.token),
        holder=0,
        started_at=time.time(),
    )
    for folder in node.places.made:
        folder.mkdir()
    files.write(node)
    return node


@contextmanager
def raylet(tmp_path: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of that name, with the mark of a node."""
    program = tmp_path / "raylet"
    if not program.exists():
        shutil.copy(shutil.which("sleep") or "", program)
    process = subprocess.Popen([program, "600"], env={**os.environ, CLUSTER_MARK: mark})
    try:
        # The kernel shows a new program's name before its environment.
        place = Path("/proc", str(process.pid))
        eventually(lambda: (place / "comm").read_text() == "raylet\n")
        eventually(lambda: f"{CLUSTER_MARK}={mark}".encode() in (place / "environ").read_bytes())
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_the_record_is_read_as_written(files: NodeFiles, tmp_path: Path) -> None:
    assert files.read() is None
    node = recorded(files, tmp_path)
    assert files.read() == node


def test_a_damaged_record_names_its_file(files: NodeFiles) -> None:
    files.record.write_text('{"mark": 1')
    with pytest.raises(HostClusterError, match=str(files.record)):
        files.read()


def test_only_one_command_changes_the_node_at_a_time(files: NodeFiles) -> None:
    with (
        files.changing(),
        pytest.raises(HostClusterError, match="another `holdfast cluster` command"),
        files.changing(),
    ):
        pass


def test_a_running_node_is_not_started_twice(files: NodeFiles, tmp_path: Path) -> None:
    node = recorded(files, tmp_path)
    with raylet(tmp_path, MARK) as process:
        with pytest.raises(HostClusterError, match="holdfast cluster leave"):
            nodes.refuse_second_node(files)
        assert process.poll() is None
    assert files.read() == node


def test_what_a_killed_node_left_is_cleared(files: NodeFiles, tmp_path: Path) -> None:
    node = recorded(files, tmp_path)
    nodes.refuse_second_node(files)
    assert files.read() is None
    assert not any(folder.exists() for folder in node.places.made)


def test_the_end_of_a_node_ends_its_own_processes_only(files: NodeFiles, tmp_path: Path) -> None:
    node = recorded(files, tmp_path)
    files.token.write_text("token")
    with raylet(tmp_path, MARK) as own, raylet(tmp_path, "another") as foreign:
        nodes.end(files, node)
        assert own.wait(DEADLINE_S) == -15  # asked, not killed
        assert foreign.poll() is None
    assert files.read() is None
    assert files.token.exists()
    assert not any(folder.exists() for folder in node.places.made)


def test_another_program_on_a_port_of_the_node_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = NodeOptions("a", "127.0.0.1", Endpoint("h", 1), Ports(1, port, port + 1))
        with pytest.raises(HostClusterError, match=f"port {port} .*another --node-manager-port"):
            nodes.refuse_used_ports(options)


@pytest.mark.parametrize(("ray", "python"), [("0.1", None), (None, "3.0.1")])
def test_another_version_is_refused(ray: str | None, python: str | None) -> None:
    head = Endpoint("h", 1)
    same = HeadAnswer(version("ray"), platform.python_version(), ())
    nodes.refuse_other_versions(same, head)
    other = HeadAnswer(ray or same.ray, python or same.python, ())
    with pytest.raises(HostClusterError, match=f"{ray or python}, this machine has"):
        nodes.refuse_other_versions(other, head)


@pytest.mark.parametrize(
    ("theirs", "warned"), [("0123456789ab", True), (build.LOADED, False), ("", False)]
)
def test_another_build_of_the_head_is_a_warning(theirs: str, warned: bool) -> None:
    head = ClusterNode("h", "10.0.0.1", True, True, 1.0, 0.0, {}, theirs)
    other = ClusterNode("n", "10.0.0.2", True, False, 1.0, 0.0, {}, "of another node")
    answer = HeadAnswer(version("ray"), platform.python_version(), (other, head))
    warning = nodes.other_build(answer, Endpoint("h", 1))
    assert bool(warning) == warned
    if warned:
        assert theirs in warning and build.LOADED in warning and "Install" in warning


@pytest.mark.parametrize(
    ("theirs", "tls_dir", "why"),
    [
        ("on", None, "copy its folder of certificates.* --tls-dir"),
        ("off", Path("/tls"), "leave out --tls-dir .HOLDFAST_TLS_DIR."),
        ("on", Path("/tls"), ""),
        ("off", None, ""),
        ("", Path("/tls"), ""),
    ],
)
def test_head_and_machine_both_use_tls_or_neither(
    theirs: str, tls_dir: Path | None, why: str
) -> None:
    head = ClusterNode("h", "10.0.0.1", True, True, 1.0, 0.0, {}, tls=theirs)
    answer = HeadAnswer(version("ray"), platform.python_version(), (head,))
    with pytest.raises(HostClusterError, match=why) if why else nullcontext():
        nodes.refuse_other_tls(answer, Endpoint("h", 1), tls_dir)


@pytest.mark.parametrize(
    ("options", "rays", "warned"),
    [(["--tls"], None, True), (["--tls"], "0", True), (["--tls"], "1", False), ([], None, False)],
)
def test_a_start_with_tls_says_first_that_rays_calls_have_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    rays: str | None,
    warned: bool,
) -> None:
    def start(starter: nodes.Starter) -> HeadAnswer:
        said.append(capsys.readouterr().err)
        return HeadAnswer("", "", ())

    said: list[str] = []
    monkeypatch.setattr(nodes, "refuse_used_ports", lambda options: None)
    monkeypatch.setattr(nodes.Starter, "start", start)
    if rays is not None:
        monkeypatch.setenv("RAY_USE_TLS", rays)
    up = ["cluster", "up", "--node-address", "127.0.0.77", "--data-dir", str(tmp_path)]
    assert run([*up, *options]) == ExitCode.OK
    (before,) = (" ".join(each.split()) for each in said)
    assert ("but not for Ray's: calls between its processes" in before) == warned
    assert ("set RAY_USE_TLS and RAY_TLS_* on all machines" in before) == warned


def test_unusable_certificates_are_refused_before_ray_starts(tmp_path: Path) -> None:
    nodes.refuse_unusable_certificates(None)
    with pytest.raises(HostClusterError, match=r"it needs the files ca.crt, tls.crt and tls.key"):
        nodes.refuse_unusable_certificates(tmp_path)


def test_a_machine_without_a_way_to_others_must_name_its_address() -> None:
    with pytest.raises(HostClusterError, match="--node-address"):
        nodes.own_address("127.0.0.1")
