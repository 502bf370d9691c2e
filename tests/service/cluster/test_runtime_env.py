"""Code is published: Holdfast's own without keeping other threads waiting, users' in a folder."""

from __future__ import annotations

import io
import stat
import threading
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray._private.runtime_env import packaging

from holdfast_service.cluster import runtime_env
from holdfast_service.cluster.sent_code import SentCode
from holdfast_service.job_model.supervisor_protocol import LaunchRefused
from holdfast_workers.ipc.environment import CODE_FOLDER

WAIT_S = 60.0


def test_a_slow_publication_keeps_no_other_thread_waiting_and_pins_only_its_own_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    pins: list[str] = []

    def pin(uri: str, *, expiration_s: int) -> None:
        pins.append(uri)
        begun.set()
        assert may_end.wait(WAIT_S)

    monkeypatch.setattr(packaging, "pin_runtime_env_uri", pin)
    monkeypatch.setattr(packaging, "package_exists", lambda _: True)
    code = runtime_env.OwnCode(SentCode("gcs://code.zip", b""))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(code.options)
        try:
            assert begun.wait(WAIT_S)
            threads.submit(code.forget_connection).result(WAIT_S)
        finally:
            may_end.set()
        assert first.result(WAIT_S) == {"runtime_env": {"py_modules": ["gcs://code.zip"]}}
    code.options()
    code.options()
    assert pins == ["gcs://code.zip"] * 2, "the next cluster has its own pin, once"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What Ray's control service has received, by its URI."""
    packages: dict[str, bytes] = {}
    monkeypatch.setattr(packaging, "pin_runtime_env_uri", lambda _uri, expiration_s: None)
    monkeypatch.setattr(packaging, "package_exists", packages.__contains__)
    monkeypatch.setattr(packaging, "upload_package_to_gcs", packages.__setitem__)
    return packages


def packed(**files: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as package:
        for name, content in files.items():
            package.writestr(f"{name}.py", content)
        package.writestr("lib/empty/", b"")
        script = zipfile.ZipInfo("./lib/run.sh")
        script.external_attr = (stat.S_IFREG | 0o6711) << 16
        package.writestr(script, b"#!/bin/sh")
    return target.getvalue()


def test_users_code_lies_in_a_folder_and_keeps_no_right_but_that_to_execute(
    sent: dict[str, bytes],
) -> None:
    runtime_env.publish("sha256:1", packed(train=b"x = 1"))
    (package,) = (zipfile.ZipFile(io.BytesIO(content)) for content in sent.values())
    modes = {entry.filename: entry.external_attr >> 16 for entry in package.infolist()}
    assert modes == {
        f"{CODE_FOLDER}/train.py": stat.S_IFREG | 0o644,
        f"{CODE_FOLDER}/lib/empty/": stat.S_IFDIR | 0o755,
        f"{CODE_FOLDER}/lib/run.sh": stat.S_IFREG | 0o755,
    }
    assert package.read(f"{CODE_FOLDER}/train.py") == b"x = 1"


def test_a_large_file_of_users_code_is_never_in_memory_as_a_whole(sent: dict[str, bytes]) -> None:
    nbytes = 16 << 20
    content = packed(table=bytes(nbytes))
    tracemalloc.start()
    try:
        runtime_env.publish("sha256:1", content)
        assert tracemalloc.get_traced_memory()[1] < nbytes / 4
    finally:
        tracemalloc.stop()


def damaged() -> bytes:
    content = packed(train=b"x = 1")
    return content.replace(content[14:18], b"abcd")  # its checksum


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "code_lost"), (b"no zip", "code_unreadable"), (damaged(), "code_unreadable")],
)
def test_code_that_no_later_try_can_send_refuses_the_launch(
    sent: dict[str, bytes], content: bytes | None, code: str
) -> None:
    with pytest.raises(LaunchRefused, match="again") as refused:
        runtime_env.publish("sha256:1", content)
    assert refused.value.code == code
    assert not sent
    sent[runtime_env._uri("sha256:1")] = b"there already"
    runtime_env.publish("sha256:1", content)


def test_a_control_service_that_takes_no_code_is_asked_again_later(
    sent: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_uri: str, _content: bytes) -> None:
        raise RuntimeError("Failed to store package in the GCS")

    monkeypatch.setattr(packaging, "upload_package_to_gcs", fail)
    with pytest.raises(ConnectionError, match="cannot be sent"):
        runtime_env.publish("sha256:1", packed(train=b"x = 1"))
