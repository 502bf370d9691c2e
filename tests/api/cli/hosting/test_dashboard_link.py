"""What `holdfast serve` says of the dashboard when it has started."""

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


def started(folder: Path) -> Callable[..., Awaitable[None]]:
    async def server(*_: Any, on_ready: serve.OnReady, **__: Any) -> None:
        file = ServerFile(address="http://127.0.0.1:1", pid=1, data_dir=str(folder))
        on_ready(file, "the-code")

    return server
