"""For all tests: the quick ones first, so that a plain mistake is seen at once."""

from __future__ import annotations

import gc
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

from tests.support.checkpoint.s3_server import S3Server
from tests.support.service.postgres import running_postgres

pytest_plugins = (
    "tests.support.suites.machine",
    "tests.support.suites.recording",
    "tests.support.suites.selection",
)
SLOW_MARKS = ("cluster", "chaos", "soak")

# How long an example takes says more of the machine's load than of the code.
hypothesis.settings.register_profile("holdfast", deadline=None)
hypothesis.settings.load_profile("holdfast")

# structlog's renderer draws a traceback with its sources and variables, which takes a second.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# A shell lets its background jobs ignore Ctrl-C, and so would all that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """The collection makes hundreds of thousands of objects that stay: to search them for garbage,
    now and in every later collection of garbage, takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """The controller of `pytest -n` leaves the collection to its workers: it never finishes one."""
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start or kill real processes go last; otherwise the order stays."""
    items.sort(key=lambda item: sum(mark in item.keywords for mark in SLOW_MARKS))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests: each makes its own buckets."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in real shared memory."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-memory-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A server for all tests."""
    with running_postgres() as server:
        yield server
