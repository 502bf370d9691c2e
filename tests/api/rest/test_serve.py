"""The server's process: refusals at the start, and what remains after SIGKILL and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.support.memory.certificates import certified, new_authority
from tests.support.service.fake_cluster import FakeCluster
from tests.support.waiting import DEADLINE_S, eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast.rest import serve
from holdfast.rest.serve import is_loopback
from holdfast.schemas import SERVER_FILE, ServerFile
from holdfast_service.embedded_cluster import local_cluster, processes
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.installation import check_key

START_S = 90.0
NO_PROXIES = (
    "*",
    "https://lab.example/path",
    "ftp://lab.example",
    "a:b",
    "http://fd00::5:8642",
    "",
)
GPUS = ("GPU-a", "GPU-b")
"""Only named: with GPUs, one node has them all, and nothing here touches them."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    local_cluster.stop(tmp_path)


def started(data_dir: Path) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "holdfast", "serve", "--json", "--port", "0")
    with (data_dir / "server.log").open("a") as log:
        return subprocess.Popen(
            [*command, "--data-dir", str(data_dir)],
            env={**os.environ, "HOLDFAST_LOCAL_GPUS": ",".join(GPUS)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return str(json.loads(server.stdout.readline())["address"])


def processes_of(data_dir: Path) -> list[str]:
    """The processes of this server and of its cluster's keeper, by their command lines."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline", "status"])
        if str(data_dir) in " ".join(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_only_addresses_of_this_machine_alone_are_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert not is_loopback(host)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--host", "0.0.0.0"], "a server has one user"),
        (["--ray-address", "127.0.0.1:1"], "--store-uri s3://bucket/prefix"),
        (["--send-own-code"], "--ray-address"),
        (["--autoscale"], "give its --ray-address too"),
        *((["--allowed-host", name], "--allowed-host") for name in NO_PROXIES),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    arguments = ["serve", "--port", "0", "--data-dir", str(tmp_path), *options]
    assert run(arguments) == ExitCode.SERVER
    refusal = " ".join(capsys.readouterr().err.split())
    assert why in refusal and "Traceback" not in refusal
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", "--port", port, "--data-dir", str(tmp_path)]) == ExitCode.SERVER
    assert "--port" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


async def test_answers_do_not_wait_for_acknowledgements(settings: Settings) -> None:
    without_delay: list[int] = []

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        without_delay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = serve.bound(settings.model_copy(update={"port": 0}))
    async with await asyncio.start_server(look, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
    assert without_delay == [1]


@pytest.mark.seconds
def test_an_end_with_stdin_is_refused_without_a_pipe_and_starts_no_cluster(
    tmp_path: Path,
) -> None:
    command = (sys.executable, "-m", "holdfast", "serve", "--port", "0", "--end-with-stdin")
    ended = subprocess.run(
        [*command, "--data-dir", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == ExitCode.SERVER, ended.stderr
    assert "--end-with-stdin needs a pipe as stdin" in ended.stderr
    assert list(tmp_path.iterdir()) == []


async def of_a_pre_release(data_dir: Path) -> None:
    with closing(sqlite3.connect(data_dir / "holdfast.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('0005')")
        database.commit()


async def with_another_key(data_dir: Path) -> None:
    store = await Store.open(Settings(data_dir=data_dir))
    async with store.write() as session:
        await check_key(session, b"k" * 32, data_dir)
    await store.close()


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (of_a_pre_release, ("schema version 0005", "pre-release", "--database-url")),
        (with_another_key, ("job-secrets.key",)),
    ],
)
def test_a_database_that_is_not_for_this_server_is_refused_before_a_cluster_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: Any, facts: tuple[str, ...]
) -> None:
    asyncio.run(made(tmp_path))
    assert run(["serve", "--port", "0", "--data-dir", str(tmp_path)]) == ExitCode.SERVER
    refusal = capsys.readouterr().err
    assert all(fact in refusal for fact in facts) and "Traceback" not in refusal
    assert local_cluster.find(tmp_path) is None


def test_other_users_lose_their_access_to_an_existing_data_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    url = ["--database-url", "postgresql://user@127.0.0.1:1/x"]  # so that nothing starts
    arguments = ["serve", "--port", "0", "--data-dir", str(tmp_path), *url]
    assert run(arguments) == ExitCode.SERVER
    refusal = capsys.readouterr().err
    assert "cannot open the database" in refusal and "Traceback" not in refusal
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o1777)
    assert run(arguments) == ExitCode.SERVER
    assert "--data-dir" in capsys.readouterr().err
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.cluster
@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_a_killed_server_leaves_the_cluster_and_the_next_adopts_it(data_dir: Path) -> None:
    first = started(data_dir)
    address(first)
    cluster = local_cluster.find(data_dir)
    assert cluster is not None
    file = data_dir / SERVER_FILE
    assert file.stat().st_mode & 0o077 == 0
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert local_cluster.find(data_dir) == cluster

    second = started(data_dir)
    with Client(address(second), data_dir=data_dir) as client:
        assert client.ready().checks == {"database": "ok", "cluster": "ok", "reconciler": "ok"}
        eventually(lambda: client.cluster().capacity.gpus == len(GPUS), START_S)
        assert [node.gpus for node in client.nodes() if node.cpus] == [len(GPUS)]
    adopted = local_cluster.find(data_dir)
    assert adopted == cluster

    second.terminate()
    assert second.wait(DEADLINE_S) == 0
    assert not file.exists()
    assert local_cluster.find(data_dir) is None
    assert processes.of_cluster(cluster.cluster_id) == []
    assert not Path(cluster.temp_dir).exists()
    assert not Path(cluster.shm_root).exists()
    assert processes_of(data_dir) == []
    assert "SIGTERM received" not in (data_dir / "server.log").read_text()


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_server_stopped_during_its_start_leaves_nothing(data_dir: Path) -> None:
    server = started(data_dir)
    state = data_dir / "cluster" / "state.json"
    eventually(state.exists, START_S, "the keeper has not started")
    cluster = local_cluster.folder(data_dir).read()
    assert cluster is not None
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    eventually(lambda: processes_of(data_dir) == [])
    assert processes.of_cluster(cluster.cluster_id) == []
    assert not Path(cluster.temp_dir).exists()
    assert not Path(cluster.shm_root).exists()


def _ignore(_server: ServerFile, _code: str | None) -> None:
    pass


class _ClosableCluster(FakeCluster):
    def close(self) -> None:
        """Nothing is connected."""


def _without_ray(
    monkeypatch: pytest.MonkeyPatch, connected: Callable[[serve._Broken], None]
) -> None:
    """A server that is connected to no cluster; `connected` is called once it would be."""

    async def connection(_settings: Settings, _store: Store, broken: serve._Broken) -> object:
        def connect(_find_address: object) -> FakeCluster:
            connected(broken)
            return _ClosableCluster()

        return connect

    monkeypatch.setattr(serve, "_connection", connection)
    monkeypatch.setattr(serve, "_test_store", lambda _: asyncio.sleep(0))


async def test_a_server_with_a_certificate_serves_https_only_and_leaves_its_address_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_ray(monkeypatch, lambda _: None)
    folder = certified(tmp_path / "tls", new_authority())
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    trusting.check_hostname = False  # the certificate names no host
    answers: list[object] = []

    def ask(server: ServerFile) -> None:
        assert server.address.startswith("https://127.0.0.1:")
        try:
            url, token = (
                f"{server.address}/api/v1/jobs",
                {"Authorization": f"Bearer {server.token}"},
            )
            found = httpx.get(url, headers=token, verify=trusting, timeout=DEADLINE_S)
            answers.append(found.status_code)
            with pytest.raises(httpx.TransportError):
                httpx.get(server.address.replace("https", "http"), timeout=DEADLINE_S)
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(server.address, timeout=DEADLINE_S)
            answers.append("refused")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def ready(server: ServerFile, code: str | None) -> None:
        assert code is not None and server.token is not None
        files.append(ServerFile.model_validate_json(file.read_text()))
        assert file.stat().st_mode & 0o777 == 0o600
        assert files == [server]
        threading.Thread(target=ask, args=(server,), daemon=True).start()

    files: list[ServerFile] = []
    file = tmp_path / "data" / SERVER_FILE
    settings = Settings(
        data_dir=tmp_path / "data",
        port=0,
        ray_address="there:6379",
        store_uri="/store",
        https_cert_file=folder / "tls.crt",
        https_key_file=folder / "tls.key",
    )
    await asyncio.wait_for(serve.serve(settings, on_ready=ready), 60.0)
    assert answers == [200, "refused"]
    assert files and not file.exists(), "the file of the server goes with it"


@pytest.mark.parametrize(
    ("certificate", "key", "why"),
    [
        ("tls.crt", None, "set both"),
        ("tls.crt", "none", "No such file"),
        ("ca.crt", "tls.key", "a certificate and its own key, not encrypted"),
        ("tls.crt", "exposed.key", "refused: other users can read it: chmod 600"),
    ],
)
def test_a_certificate_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    certificate: str,
    key: str | None,
    why: str,
) -> None:
    folder = certified(tmp_path / "tls", new_authority())
    shutil.copy(folder / "tls.key", folder / "exposed.key")
    (folder / "exposed.key").chmod(0o640)
    monkeypatch.setenv("HOLDFAST_HTTPS_CERT_FILE", str(folder / certificate))
    if key is not None:
        monkeypatch.setenv("HOLDFAST_HTTPS_KEY_FILE", str(folder / key))
    data_dir = tmp_path / "data"
    assert run(["serve", "--port", "0", "--data-dir", str(data_dir)]) == ExitCode.SERVER
    refusal = " ".join(capsys.readouterr().err.split())
    assert why in refusal and "HOLDFAST_HTTPS_KEY_FILE" in refusal
    assert not data_dir.exists()


async def test_a_server_whose_ray_client_cannot_connect_anew_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_ray(
        monkeypatch,
        lambda broken: threading.Timer(0.5, broken.end, ["its raylet has died"]).start(),
    )
    settings = Settings(data_dir=tmp_path, port=0, ray_address="there:6379", store_uri="/store")
    with pytest.raises(serve.ServeError, match=r"its raylet has died; .* Start the server again"):
        await asyncio.wait_for(serve.serve(settings, on_ready=_ignore), DEADLINE_S)
