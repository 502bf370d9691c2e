"""The client is light to import, finds its server, and has typed errors."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import DEADLINE_S

import holdfast
from holdfast import Client
from holdfast.client import address
from holdfast.client.http_answers import FileDownload
from holdfast.client.retry import RetrySchedule
from holdfast.errors import ServerError
from holdfast.schemas import SERVER_FILE, ServerFile

HEAVY = "ray torch numpy fastapi starlette uvicorn sqlalchemy structlog"


def test_importing_holdfast_is_light() -> None:
    program = f"import sys, holdfast; print([m for m in {HEAVY.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.seconds
def test_errors_have_their_types_and_codes(client: Client, server: LiveServer) -> None:
    with pytest.raises(holdfast.InvalidSpec) as invalid:
        client.submit({**SPEC, "parallel": {"dp_shard": 2, "tp": 3}})
    assert "parallel.tp" in {fault["path"] for fault in invalid.value.faults}
    assert "\n  parallel.tp: " in str(invalid.value)
    with pytest.raises(holdfast.NotFound) as missing:
        client.get("../jobs")  # quoted: it stays one segment of the path
    assert missing.value.code in ("job_not_found", "not_found")
    client.submit(SPEC, idempotency_key="k")
    with pytest.raises(holdfast.Conflict):
        client.submit({**SPEC, "name": "other"}, idempotency_key="k")
    job = client.submit(SPEC)
    with pytest.raises(holdfast.WaitTimeout):
        client.wait(job.id, timeout_s=0.1, poll_s=0.02)
    server.stop()
    with (
        Client(server.address, retry_s=0.1) as hasty,
        pytest.raises(holdfast.ServerUnreachable, match="holdfast serve"),
    ):
        hasty.get(job.id)
    with Client(server.address, retry_s=0.1) as hasty, pytest.raises(holdfast.ServerUnreachable):
        list(hasty.follow(job.id))


def test_the_server_is_found_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv(address.DATA_DIR_VARIABLE, str(tmp_path))
    assert address.resolve() == address.DEFAULT_ADDRESS
    file = ServerFile(address="http://127.0.0.1:4711", pid=1, data_dir=str(tmp_path))
    (tmp_path / SERVER_FILE).write_text(file.model_dump_json())
    assert address.resolve() == "http://127.0.0.1:4711"
    monkeypatch.setenv(address.ADDRESS_VARIABLE, "127.0.0.1:1/")
    assert address.resolve() == "http://127.0.0.1:1"
    assert address.resolve("http://given") == "http://given"


def test_a_download_goes_on_only_in_the_same_file() -> None:
    download = FileDownload(RetrySchedule(1.0))
    assert download.opened(_answer(200, 10, "a")) == 0
    download.wrote(4)
    headers = download.request("/file")["headers"]
    assert (headers["Range"], headers["If-Range"]) == ("bytes=4-", '"a"')
    assert download.opened(_answer(206, 6, "a", "bytes 4-9/10")) == 4
    for etag, part in (("a", "bytes 3-9/10"), ("b", "bytes 4-9/10")):
        with pytest.raises(ServerError, match="another part"):
            download.opened(_answer(206, 6, etag, part))
    assert download.opened(_answer(200, 8, "b")) == 0
    assert (download.written, download.whole) == (0, 8)


def _answer(status: int, nbytes: int, etag: str, part: str | None = None) -> httpx.Response:
    headers = {"Content-Length": str(nbytes), "ETag": f'"{etag}"'}
    return httpx.Response(status, headers=headers | ({"Content-Range": part} if part else {}))


@pytest.mark.parametrize("header", ["Content-Encoding: gzip\r\nContent-Length: 4", "X: y"])
def test_a_download_changed_by_a_proxy_is_refused(tmp_path: Path, header: str) -> None:
    requests = []

    def serve_once(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            requests.append(connection.recv(65536))
            connection.sendall(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\nabcd".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = threading.Thread(target=serve_once, args=(listener,))
        proxy.start()
        proxied = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(proxied) as client, pytest.raises(ServerError, match="comes changed"):
            client.download("operation", tmp_path / "model.safetensors")
        proxy.join(DEADLINE_S)
    assert b"accept-encoding: identity" in requests[0].lower()
    assert list(tmp_path.iterdir()) == []
