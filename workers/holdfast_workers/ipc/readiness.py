"""Waits for one descriptor. Unlike `select()`, they take numbers above 1023, too."""

from __future__ import annotations

import select
import socket

_Descriptor = int | socket.socket


def is_readable(source: _Descriptor, timeout_s: float | None = 0.0) -> bool:
    """Whether a read does not wait, within this time: it finds bytes, or the end. A pidfd: whether
    its process has ended. None: wait for ever."""
    return _is_ready(source, select.POLLIN, timeout_s)


def is_writable(target: _Descriptor, timeout_s: float) -> bool:
    """Whether a write does not wait, within this time; it may find that nobody reads any more."""
    return _is_ready(target, select.POLLOUT, timeout_s)


def _is_ready(descriptor: _Descriptor, what: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
