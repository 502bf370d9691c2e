"""A look at a program's threads that cannot begin is left out: the program goes on."""

from __future__ import annotations

import errno
import tempfile
from typing import NoReturn

import pytest

from holdfast_workers.programs.last_threads import LastThreads
from holdfast_workers.progress import inspection


def test_without_room_for_a_file_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(inspection, "dump_command", lambda _: ["true"])
    threads = LastThreads()
    assert not threads.look(1, 10.0, 10.0)
    assert (threads.found, threads.look(1, 11.0, 10.0)) == ("", False)
