"""Which imported module has started a thread: real modules, real threads of Python and of C."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from holdfast_workers.ipc.thread_origins import ThreadOrigins

STARTS_THREAD = """
import threading
ended = threading.Event()
threading.Thread(target=ended.wait, name="poller-of-the-library", daemon=True).start()
"""
STARTS_NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
libc.pthread_create(
    ctypes.byref(ctypes.c_ulong()), None, libc.usleep, ctypes.c_void_p({microseconds})
)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules; those that were imported from it are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_innermost_module_whose_import_starts_a_thread_is_named(modules: Path) -> None:
    (modules / "users_recipe.py").write_text("import json\nimport quiet\nimport library\n")
    (modules / "quiet.py").write_text("import library_that_ends")
    (modules / "library_that_ends.py").write_text(
        "import threading\nthread = threading.Thread(target=int)\nthread.start()\nthread.join()\n"
    )
    (modules / "library.py").write_text(STARTS_THREAD)
    origins = ThreadOrigins()
    assert origins.started() == ()
    with origins.recording("users_recipe:Recipe"):
        importlib.import_module("users_recipe")
    assert origins.started() == ("library (poller-of-the-library)",)
    importlib.import_module("library").ended.set()
    eventually(lambda: origins.started() == (), failure_message="the thread to end")


def test_a_thread_that_no_python_code_knows_is_named_by_its_module(modules: Path) -> None:
    (modules / "native.py").write_text(STARTS_NATIVE_THREAD.format(microseconds=300_000))
    origins = ThreadOrigins()
    with origins.recording("users_recipe:Recipe"):
        importlib.import_module("native")
    (found,) = origins.started()
    assert found.startswith("native (")
    eventually(lambda: origins.started() == (), failure_message="the thread to end")


def test_a_thread_that_no_import_started_is_named_by_the_recipe_or_as_later() -> None:
    ended = threading.Event()
    origins = ThreadOrigins()
    with origins.recording("users_recipe:Recipe"):
        threading.Thread(target=ended.wait, name="first", daemon=True).start()
    threading.Thread(target=ended.wait, name="second", daemon=True).start()
    assert origins.started() == (
        "users_recipe:Recipe (first)",
        "code that ran after the imports (second)",
    )
    assert ThreadOrigins().started() == ()  # they were there before
    ended.set()


def test_imports_are_as_before_once_the_recording_has_ended(modules: Path) -> None:
    (modules / "raises.py").write_text("raise ValueError('of the user')")
    kept = SourceFileLoader.exec_module
    with pytest.raises(ValueError, match="of the user"), ThreadOrigins().recording("recipe"):
        importlib.import_module("raises")
    assert SourceFileLoader.exec_module is kept
