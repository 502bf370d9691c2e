"""Hostile requirements, archives and uploads of code are refused in words, and stall nothing."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.rest.test_hostile_input import refused
from tests.support.service.live_server import LiveServer, live_server
from tests.support.waiting import DEADLINE_S

from holdfast_service.errors import CodeRefused
from holdfast_service.services.code_inspection import (
    ANY_RATIO_BYTES,
    MAX_FILES,
    MAX_NAME_BYTES,
    MAX_PATH_BYTES,
    inspect_package,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("hostile-code")
    with live_server(folder) as server:
        yield server


@pytest.fixture
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.address, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


REQUIREMENTS = {
    "an option": "--requirement=/etc/passwd",
    "a second line": "x @ https://h/x.whl\n--requirement=/etc/passwd",
    "a second line for pip alone": "x @ https://h/x.whl\u2028--requirement=/etc/passwd",
    "an option as an address": "x @ --requirement=/etc/passwd",
    "an option in a marker": "x; python_version > '3 --index-url=https://evil.example'",
    "a continued line": "x @ https://h/x.whl\\",
    "a variable of the node": "x @ https://evil.example/${PIP_INDEX_URL}",
    "a NUL": "x @ https://h/\0",
    "an escape sequence": "x @ https://h/\x1b[2J",
    "a password": "x @ https://me:word@example.org/x.whl",
    "a token": "x @ https://token@example.org/x.whl",
    "nothing": "",
}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_requirement_that_is_more_than_one_is_refused(http: httpx.Client, name: str) -> None:
    document = {"name": "x", "runtime_env": {"pip": [REQUIREMENTS[name]]}}
    problem = refused(http.post("/api/v1/jobs", json=document), 422)
    assert all(fault["path"].startswith("runtime_env.pip") for fault in problem["faults"]), problem


def packed(*members: str | zipfile.ZipInfo, content: bytes = b"x = 1\n") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for member in members:
            package.writestr(member, content)
    return target.getvalue()


def member(name: str, kind: int = stat.S_IFREG, method: int = zipfile.ZIP_DEFLATED) -> Any:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (kind | 0o644) << 16
    entry.compress_type = method
    return entry


def changed(package: bytes, at: int, value: int, *, local: int | None = None) -> bytes:
    """A field of two bytes in the directory's record of the first member, and in its own header."""
    changed_bytes = bytearray(package)
    record = package.index(b"PK\x01\x02")
    struct.pack_into("<H", changed_bytes, record + at, value)
    if local is not None:
        struct.pack_into("<H", changed_bytes, local, value)
    return bytes(changed_bytes)


PLAIN = packed("a.py")
RECORD = PLAIN[PLAIN.index(b"PK\x01\x02") : PLAIN.index(b"PK\x05\x06")]
TWICE = packed("a.py", "b.py").replace(b"b.py", b"a.py")
ARCHIVES = {
    "no zip": (b"no zip at all", "not a readable zip file"),
    "nothing": (b"", "not a readable zip file"),
    "cut": (PLAIN[:-30], "not a readable zip file"),
    "no file": (packed(), "is empty"),
    "a folder alone": (packed(member("a/", stat.S_IFDIR), content=b""), "is empty"),
    "a bad checksum": (PLAIN.replace(PLAIN[14:18], b"abcd"), "Bad CRC-32"),
    "damaged content": (changed(PLAIN, 10, 8, local=34), "not a readable zip file"),
    "encryption": (changed(PLAIN, 8, 1, local=6), "'a.py' is encrypted"),
    "strong encryption": (changed(PLAIN, 8, 0x41, local=6), "'a.py' is encrypted"),
    "an unknown method": (changed(PLAIN, 10, 97, local=8), "packed by method 97"),
    "a rare method": (packed(member("a.py", method=zipfile.ZIP_LZMA)), "packed by method 14"),
    "a NUL in a name": (PLAIN.replace(b"a.py", b"a\0py"), "has a control character"),
    "a name that is NUL": (PLAIN.replace(b"a.py", b"\0.py"), "has a control character"),
    "an escape sequence in a name": (packed("\x1b[2J.py"), "has a control character"),
    "no UTF-8 in a name": (packed("ä.py").replace("ä".encode(), b"\xff\xff"), "not a readable zip"),
    "a path upwards": (packed("a/../../b.py"), "leads out"),
    "a folder upwards": (packed("../a/", content=b""), "leads out"),
    "an absolute path": (packed("/etc/passwd"), "leads out"),
    "a path of Windows": (packed("a\\..\\..\\b.py"), "leads out"),
    "a link": (packed(member("a", stat.S_IFLNK)), "not a regular file"),
    "a device": (packed(member("a", stat.S_IFBLK)), "not a regular file"),
    "a folder with content": (packed("a/", "b.py"), "'a/' is a folder and has content"),
    "one name twice": (TWICE, "'a.py' is in the zip file twice"),
    "one name in two spellings": (packed("a.py", "./a.py"), "is in the zip file twice"),
    "a file that is a folder": (packed("a", "a/b.py"), "'a' is both a file and a folder"),
    "a long name": (packed("a" * (MAX_NAME_BYTES + 1)), "has too long a name"),
    "a long path": (packed("a/" * (MAX_PATH_BYTES // 2) + "b"), "has too long a name"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_no_node_could_unpack_is_refused(http: httpx.Client, name: str) -> None:
    content, message = ARCHIVES[name]
    problem = refused(send(http, content), 422)
    assert (problem["code"], message in problem["detail"]) == ("invalid_code", True), problem


def send(http: httpx.Client, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/zip"}
    return http.post("/api/v1/code", content=content, headers=headers)


MANY = MAX_FILES + 1
LARGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "files": (lambda: packed(*map(str, range(MANY)), content=b""), f"has {MANY:,} files"),
    "folders": (
        lambda: packed(*(f"{n}/" for n in range(MANY)), content=b""),
        f"has {MANY:,} files",
    ),
    "records": (lambda: RECORD * 200_000, "more than 100,000 files"),
    "bytes": (lambda: packed("a", content=bytes(ANY_RATIO_BYTES + 1)), "bytes when unpacked"),
}


@pytest.mark.parametrize("name", LARGE)
def test_an_archive_that_says_more_than_a_node_can_hold_is_refused(name: str) -> None:
    make, message = LARGE[name]
    with pytest.raises(CodeRefused, match=message):
        inspect_package(make(), 1 << 30)


@given(st.data())
def test_any_damage_is_refused_in_words_or_does_not_matter(data: st.DataObject) -> None:
    package = bytearray(packed("a.py", "lib/b.py", "lib/c/", content=b""))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(package) - 1))
        package[at] = data.draw(st.integers(0, 255))
    try:
        inspect_package(bytes(package), 1 << 20)
    except CodeRefused as error:
        assert str(error)


def test_an_ordinary_archive_is_accepted(http: httpx.Client) -> None:
    content = packed("train.py", "lib/ä.py", member("run.sh", method=zipfile.ZIP_STORED))
    answer = send(http, content)
    assert answer.status_code == 201, answer.text
    assert answer.json()["files"] == 3
