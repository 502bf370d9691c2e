"""A user's folder is packed to the same bytes and sent once; harmful packages are refused."""

from __future__ import annotations

import io
import os
import threading
import time
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.faults.flaky_proxy import FlakyProxy
from tests.support.service.live_server import LiveServer
from tests.support.waiting import DEADLINE_S

from holdfast import Client
from holdfast.cli.main import run
from holdfast.errors import ApiError
from holdfast.formats.code_archive import CodeUnusable, pack
from holdfast_service.views.jobs import CodeView


def folder_of(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def names(package: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(package)).namelist()


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"train.py": "x = 1", "lib/a.py": "y", "lib/b.py": "z"}
    first = folder_of(tmp_path / "one", files)
    second = folder_of(tmp_path / "two", dict(reversed(files.items())))
    os.utime(second / "train.py", (1, 1))
    (second / "train.py").chmod(0o600)
    assert pack(first) == pack(second)
    assert names(pack(first)) == ["lib/a.py", "lib/b.py", "train.py"]


def test_ignored_files_are_not_packed(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        {
            "train.py": "",
            ".git/config": "",
            "pkg/__pycache__/x.pyc": "",
            "pkg/keep.py": "",
            "data/big.bin": "",
            "data/small.txt": "",
            "notes.log": "",
            "pkg/notes.log": "",
            "pkg/secret.txt": "",
            ".holdfastignore": "*.log\n/data/*\n!/data/small.txt\n",
            "pkg/.gitignore": "secret.txt\n",
        },
    )
    kept = {"train.py", "pkg/keep.py", "data/small.txt", ".holdfastignore", "pkg/.gitignore"}
    assert set(names(pack(folder))) == kept


def test_a_line_that_is_no_pattern_is_passed_over_as_git_does(tmp_path: Path) -> None:
    lines = ["!", "\\", "a\\", "*.log"]
    files = {"train.py": "", "a": "", "notes.log": "", ".gitignore": "\n".join(lines)}
    assert names(pack(folder_of(tmp_path, {**files}))) == [".gitignore", "a", "train.py"]


def test_a_too_large_folder_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"train.py": "", "weights.bin": os.urandom(1 << 20)})
    with pytest.raises(CodeUnusable, match=r"weights\.bin \(1\.05 MB\)") as refused:
        pack(folder, max_bytes=1 << 19)
    assert ".holdfastignore" in str(refused.value)


def test_a_missing_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CodeUnusable, match="is not a folder"):
        pack(tmp_path / "nowhere")
    with pytest.raises(CodeUnusable, match="nothing"):
        pack(tmp_path)


def document(code: str) -> dict[str, Any]:
    return {"name": "own", "function": "train:main", "code": code}


def test_a_folder_is_sent_with_the_job(server: LiveServer, client: Client, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mine", {"train.py": "def main(ctx): ..."})
    job = client.submit(document(str(folder)))
    code = job.spec["code"]
    assert code == client.send_code(folder).code  # the same again
    supervisor = server.supervisor(job.id)
    assert supervisor.launch.package == pack(folder)
    assert supervisor.launch.spec.function == "train:main"


@pytest.mark.seconds
def test_a_large_folder_is_sent_through_cut_connections_and_a_restart(
    server: LiveServer, http: httpx.Client, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "mine", {"train.py": "...", "table": os.urandom(8 << 20)})
    proxy = FlakyProxy(urlsplit(server.address).port or 0)
    for after_bytes in (100_000, 6_000_000):
        proxy.add("cut_upload", method="POST", times=1, after_bytes=after_bytes)
    proxy.add("lose_answer", method="POST", times=1)

    def restart() -> None:
        server.stop()
        time.sleep(0.5)
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        with Client(proxy.endpoint, retry_s=DEADLINE_S) as client:
            code = client.send_code(folder).code
    finally:
        proxy.close()
        restarting.join(DEADLINE_S)
    assert not proxy.unused()
    assert http.get(f"/api/v1/code/{code}").content == pack(folder)


def test_sent_code_can_be_found_and_fetched(
    client: Client, http: httpx.Client, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "mine", {"train.py": "def main(ctx): ..."})
    path = f"/api/v1/code/{client.send_code(folder).code}"
    assert http.head(path).status_code == 200
    fetched = http.get(path)
    assert (fetched.headers["content-type"], fetched.content) == ("application/zip", pack(folder))
    for unknown, status in (("sha256:" + "0" * 64, 404), ("sha256:x", 422), ("x" * 500, 422)):
        assert http.head(f"/api/v1/code/{unknown}").status_code == status
        assert http.get(f"/api/v1/code/{unknown}").status_code == status


def test_a_job_with_unknown_code_is_refused(client: Client) -> None:
    with pytest.raises(ApiError) as refused:
        client.submit(document("sha256:" + "0" * 64))
    assert "send it with POST /api/v1/code first" in str(refused.value)


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for name, content in entries:
            package.writestr(name, content)
    return target.getvalue()


ZIP = {"Content-Type": "application/zip"}


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o120777 << 16
    return entry


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no zip at all", "not a readable zip file"),
        (zipped(), "empty"),
        (zipped(("../out.py", b"")), "leads out"),
        (zipped(("/etc/out.py", b"")), "leads out"),
        (zipped((link("passwd"), b"/etc/passwd")), "not a regular file"),
    ],
)
def test_a_harmful_package_is_refused(client: Client, content: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        client._send("POST", "/api/v1/code", CodeView, content=content, headers=ZIP)
    assert (refused.value.status, refused.value.code) == (422, "invalid_code")


def test_a_code_path_in_a_spec_file_is_relative_to_the_file(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "mine", {"src/train.py": "def main(ctx): ..."})
    (folder / "job.yaml").write_text("name: own\nfunction: train:main\ncode: src\n")
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    assert run(["submit", str(folder / "job.yaml")]) == 0
    with Client(server.address) as client:
        (job,) = client.list()
    assert server.supervisor(job.id).launch.package == pack(folder / "src")
