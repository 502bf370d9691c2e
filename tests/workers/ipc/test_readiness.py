"""A descriptor is waited for whatever its number is."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest

from holdfast_workers.ipc import readiness

HIGH = 1500


@pytest.fixture
def high_pipe() -> Iterator[tuple[int, int]]:
    """Both ends have numbers that `select()` does not take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], HIGH + 500), before[1]))
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, HIGH) for end in os.pipe()]
    yield ends[0], ends[1]
    for end in ends:
        os.close(end)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_descriptors_with_high_numbers_are_waited_for(high_pipe: tuple[int, int]) -> None:
    reader, writer = high_pipe
    with pytest.raises(ValueError, match="out of range"):
        select.select([reader], [], [], 0)
    assert not readiness.is_readable(reader)
    assert not readiness.is_readable(reader, 0.01)
    assert readiness.is_writable(writer, 0.0)
    os.write(writer, b"x")
    assert readiness.is_readable(reader, None)
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    assert not readiness.is_writable(writer, 0.01)


def test_an_end_is_readable() -> None:
    one, other = socket.socketpair()
    with one:
        other.close()
        assert readiness.is_readable(one)
