"""A client finds the token of its user's server, and sends it to no other user's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.service.live_server import LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast import AsyncClient, Client
from holdfast.cli.main import run
from holdfast.client import address, config, credentials
from holdfast.client.config import Config, ServerContext
from holdfast.errors import ForeignServer, InvalidConfig, ServerUnreachable, Unauthorized
from holdfast.rest.local_access import LocalAccess
from holdfast.schemas import SERVER_FILE, ServerFile

TOKEN = "a-token-of-the-tests-" + "0" * 32
NOBODY = 65534
LISTEN = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
received = b""
while b"last" not in received:
    connection, _ = listener.accept()
    received += connection.recv(65536)
print(repr(received), flush=True)
"""


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (address.ADDRESS_VARIABLE, address.DATA_DIR_VARIABLE, address.TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "config.json"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path / "data", access=LocalAccess(TOKEN)) as server:
        write_file(server.settings.data_dir, server.address)
        yield server


def write_file(folder: Path, server: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SERVER_FILE
    file = ServerFile(address=server, pid=1, data_dir=str(folder), token=TOKEN)
    path.write_text(file.model_dump_json())
    path.chmod(0o600)
    return path


def test_the_token_is_found_in_the_data_directory_however_it_is_named(
    locked: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = locked.settings.data_dir
    with Client(locked.address, data_dir=folder) as client:
        assert list(client.list()) == []
    with Client(locked.address, token=TOKEN) as client:
        assert list(client.list()) == []
    with Client(locked.address) as unknown, pytest.raises(Unauthorized, match="HOLDFAST_DATA_DIR"):
        list(unknown.list())
    monkeypatch.setenv(address.DATA_DIR_VARIABLE, str(folder))
    monkeypatch.setenv(address.TOKEN_VARIABLE, "of-another-server")
    for given in (None, locked.address, locked.address.replace("127.0.0.1", "localhost")):
        with Client(given) as client:
            assert list(client.list()) == []
    monkeypatch.delenv(address.DATA_DIR_VARIABLE)
    monkeypatch.delenv(address.TOKEN_VARIABLE)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.holdfast").symlink_to(folder)
    with Client() as client:
        assert list(client.list()) == []


def test_a_client_that_is_older_than_its_server_gets_in(tmp_path: Path) -> None:
    with live_server(tmp_path / "data", access=LocalAccess(TOKEN)) as server:
        client = Client(server.address, data_dir=tmp_path / "data", retry_s=DEADLINE_S)
        write_file(tmp_path / "data", server.address)
        assert client.version().api == "v1"


def test_a_link_signs_a_browser_in(
    locked: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(address.DATA_DIR_VARIABLE, str(locked.settings.data_dir))
    assert run(["dashboard"]) == 0
    link, _, code = capsys.readouterr().out.strip().partition("/#code=")
    assert link == locked.address
    answer = httpx.post(f"{link}/api/v1/session", headers={"Holdfast-Code": code})
    assert answer.status_code == 200


def test_another_user_on_the_same_port_of_another_address_locks_nobody_out(
    locked: LiveServer,
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root has a second user at hand")
    port = int(locked.address.rpartition(":")[2])
    for family, host in (
        (socket.AF_INET, "127.0.0.2"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::"),
    ):
        with socket.socket(family) as foreign:
            if family == socket.AF_INET6:
                foreign.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            os.fchown(foreign.fileno(), NOBODY, NOBODY)
            foreign.bind((host, port))
            foreign.listen()
            assert credentials.users_at(locked.address) == {0}, host
            with Client(locked.address, data_dir=locked.settings.data_dir) as client:
                assert list(client.list()) == []
            either = credentials.users_at(f"http://localhost:{port}")
            assert either == ({0} if host == "127.0.0.2" else {0, NOBODY}), host


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"])
def test_whoever_gets_the_connections_counts(host: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root has a second user at hand")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as foreign:
        os.fchown(foreign.fileno(), NOBODY, NOBODY)
        foreign.bind((host, 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        for name in ("127.0.0.1", "[::1]", "localhost"):
            with contextlib.suppress(OSError):
                socket.create_connection((name.strip("[]"), port), DEADLINE_S).close()
                assert credentials.users_at(f"http://{name}:{port}") == {NOBODY}, name


@pytest.fixture
def of_another_user() -> Iterator[subprocess.Popen[str]]:
    """A process of another user that listens, prints its port, and what it received."""
    if os.getuid() != 0:
        pytest.skip("only root has a second user at hand")
    listener = subprocess.Popen(
        [sys.executable, "-I", "-c", LISTEN, str(NOBODY)], stdout=subprocess.PIPE, text=True
    )
    with listener:
        yield listener
        listener.kill()


def test_no_token_goes_to_a_server_of_another_user(
    of_another_user: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_another_user.stdout is not None
    port = int(of_another_user.stdout.readline())
    url = f"http://127.0.0.1:{port}"
    assert credentials.users_at(url) == {NOBODY}
    write_file(tmp_path / "data", url)
    with (
        Client(url, data_dir=tmp_path / "data") as client,
        pytest.raises(ForeignServer, match=r"not of user root but of nobody: no token"),
    ):
        client.version()
    monkeypatch.setenv(address.TOKEN_VARIABLE, TOKEN)
    with Client(url) as client, pytest.raises(ForeignServer):
        client.version()
    monkeypatch.delenv(address.TOKEN_VARIABLE)
    for name in (url, f"http://localhost:{port}"):
        stored = ServerContext(address=name, token=TOKEN, uid=0)
        config.store(Config(contexts={"lab": stored}))
        with Client(context="lab") as client, pytest.raises(ForeignServer):
            client.version()
    asyncio.run(ask_in_a_loop(url, tmp_path / "data"))
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as own:
        own.sendall(b"last")
        own.shutdown(socket.SHUT_WR)
        received = of_another_user.stdout.readline()
    assert received.strip() == "b'last'", "nothing came on the connections before"


async def ask_in_a_loop(url: str, folder: Path) -> None:
    async with AsyncClient(url, data_dir=folder) as client:
        with pytest.raises(ForeignServer):
            await client.version()


def test_a_server_that_is_down_is_unreachable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    write_file(tmp_path / "data", url)
    with (
        Client(url, data_dir=tmp_path / "data", retry_s=0.1) as client,
        pytest.raises(ServerUnreachable, match="holdfast serve"),
    ):
        client.version()


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "data", "http://127.0.0.1:1")
    path.chmod(0o640)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        credentials.in_folder(tmp_path / "data", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://127.0.0.1:8642", 8642),
        ("http://127.1.2.3:1", 1),
        ("http://[::1]:9", 9),
        ("http://localhost", 80),
        ("https://localhost", 443),
        ("http://lab.example:8642", None),
        ("http://10.0.0.1:8642", None),
        ("http://127.0.0.1:port", None),
    ],
)
def test_the_ports_of_this_machine(url: str, port: int | None) -> None:
    assert credentials.loopback_port(url) == port
