"""Ends connections whose client neither completes a request nor takes an answer.

uvicorn ends a connection that is idle after an answer; one that sends nothing, half of the head of
a request, or the rest of a body that was refused, it would keep. An answer that is long in coming
and a stream that is quiet are not silence of the client: they have no limit here.
"""

from __future__ import annotations

import asyncio
import contextvars
import http
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.rest.http.problems import problem_response
from holdfast.rest.limits import ConnectionLimits

STREAM_SHUTDOWN_S = 3


def server_config(
    app: ASGIApp, limits: ConnectionLimits | None = None, **options: Any
) -> uvicorn.Config:
    """uvicorn's configuration for the API, with the limits of its connections. Raises the process's
    soft limit of open files to what they need."""
    limits = limits or ConnectionLimits()
    files = _allow_open_files(2 * limits.at_once)
    limits = replace(limits, at_once=min(limits.at_once, files // 2))
    protocol = partial(ClientConnection, limits=limits)
    return uvicorn.Config(
        app,
        # h11: the other parser accepts invalid HTTP: two Host headers, control characters.
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STREAM_SHUTDOWN_S,
        server_header=False,
        **options,
    )


class ClientConnection(H11Protocol):
    """One connection over HTTP/1.1, with deadlines."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self.timeout_keep_alive = limits.idle_s  # type: ignore[assignment]  # a float will do
        self._request_timer = _Timer(self.loop)
        self._answer_timer = _Timer(self.loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._await_request(self._limits.head_s)
        most = self._limits.at_once
        if len(self.connections) > most:
            self._refuse(503, "too_many_connections", f"the server has {most} connections: wait")

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_timer.stop()
        self._answer_timer.stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._request_timer.stop()

    def on_response_complete(self) -> None:
        self._await_request(self._limits.idle_s + self._limits.head_s)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        self._answer_timer.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "malformed_request", msg)

    def _await_request(self, within_s: float) -> None:
        """The rest of the present request and the head of the next one come within this time."""
        self._request_timer.start(within_s, self._end)

    def _end(self) -> None:
        begun, _ = self.conn.trailing_data
        if begun and self.conn.their_state is h11.IDLE:
            why = f"the head of the request did not arrive within {self._limits.head_s:g} s"
            self._refuse(408, "request_timeout", why)
        else:
            self.transport.close()

    def _await_taking(self) -> None:
        held = self.transport.get_write_buffer_size()

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if self._limits.untaken_bytes < left == held:
                self._reset()
            else:
                self._await_taking()

        self._answer_timer.start(self._limits.untaken_s, look)

    def _reset(self) -> None:
        """Close, and let the system forget what it has not sent."""
        reset = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, reset
        )
        self.transport.abort()

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer without the application, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = problem_response(status, code, detail, headers={"Connection": "close"})
            reason = http.HTTPStatus(status).phrase.encode()
            head = h11.Response(status_code=status, headers=answer.raw_headers, reason=reason)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, after_s: float, call: Callable[[], None]) -> None:
        """Call `call` after `after_s`; a start that is still due is replaced."""
        self.stop()
        # In a context of its own: its answer must not have the id of the request before it.
        self._handle = self._loop.call_later(after_s, call, context=contextvars.Context())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def _allow_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, or as far as the hard limit lets it; returns
    how many of these files the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
