"""Holdfast's own code is published without keeping other threads waiting."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray._private.runtime_env import packaging

from holdfast_service.cluster import runtime_env
from holdfast_service.cluster.sent_code import SentCode

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
