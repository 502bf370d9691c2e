"""What `holdfast serve` says when it has started, and when it has ended."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import run
from holdfast.rest import serve
from holdfast.schemas import ServerFile


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_code_of_the_link_goes_to_a_terminal_only(
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A service's log is kept, others may read it, and nobody uses the code up."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr("holdfast_workers.log_setup.configure", lambda **_: None)
    monkeypatch.setattr(serve, "serve", started(tmp_path))
    assert run(["serve", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert ("the-code" in said) is is_terminal
    assert ("holdfast dashboard" in said) is not is_terminal


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "stopped, with its Ray cluster; jobs that have not ended go on with the next"),
        (("--ray-address", "there:6379"), "stopped; jobs train on, and the next server adopts"),
    ],
)
def test_a_server_that_has_ended_says_what_becomes_of_its_jobs(
    options: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("holdfast_workers.log_setup.configure", lambda **_: None)
    monkeypatch.setattr(serve, "serve", started(tmp_path))
    assert run(["serve", "--data-dir", str(tmp_path), *options]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def started(folder: Path) -> Callable[..., Awaitable[None]]:
    async def server(*_: Any, on_ready: serve.OnReady, **__: Any) -> None:
        file = ServerFile(address="http://127.0.0.1:1", pid=1, data_dir=str(folder))
        on_ready(file, "the-code")

    return server
