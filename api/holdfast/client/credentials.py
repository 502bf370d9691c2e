"""The token of a server, and the check that this server is the one to send it to.

Every user of a machine can listen on its ports, also on one that a server of this user had or will
have. The kernel reports who listens, and a token is sent to no other.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import pwd
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from holdfast.errors import ForeignServer, InvalidConfig
from holdfast.schemas import SERVER_FILE, ServerFile
from holdfast_workers.tcp_table import LISTENS, TABLES, tcp_ends

_CONNECTED = "connection.connect_tcp.complete"
_OTHERS_MASK = 0o077
_LOCALHOST = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Credential:
    """A token, where it was found, and the user whose server may get it."""

    token: str
    source: str
    uid: int | None = None
    """The user whose process must listen at the address, if that is on this machine (root's may,
    too); None: any user."""


def in_folder(folder: Path, address: str) -> Credential | None:
    """The token of the server with this address and data directory; None if its file has none.
    Raises InvalidConfig if other users can read it."""
    path = folder / SERVER_FILE
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            server = ServerFile.model_validate_json(file.read())
    except (OSError, ValueError):
        return None
    if server.token is None or _place(server.address) != _place(address):
        return None
    if status.st_mode & _OTHERS_MASK:
        raise InvalidConfig(
            f"{path} is refused, because other users can read its token: chmod 600 {path}, remove "
            "the file `token` beside it, and start the server again"
        )
    return Credential(server.token, str(path), status.st_uid)


def loopback_port(address: str) -> int | None:
    """The port, if the address is of loopback."""
    try:
        parts = urlsplit(address)
        port, host = parts.port, parts.hostname or ""
        on_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None
    return (port or (443 if parts.scheme == "https" else 80)) if on_loopback else None


def users_at(address: str) -> set[int]:
    """The users whose processes listen at an address of loopback; empty if it is elsewhere, or if
    the system cannot tell."""
    port = loopback_port(address)
    if port is None:
        return set()
    name = urlsplit(address).hostname or ""
    hosts = _LOCALHOST if name == "localhost" else (ipaddress.ip_address(name),)
    there = [(ip, uid) for ip, of, uid in _listeners() if of == port]
    return {uid for host in hosts for uid in _users_at(host, there)}


class BearerToken(httpx.Auth):
    """Adds the token to each request. It is looked up each time: the server may start later. Who
    listens is asked at each new connection, before anything is sent over it."""

    def __init__(self, address: str, find: Callable[[], Credential | None]) -> None:
        self._address, self._find = address, find

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        """A new connection raises ForeignServer, or httpx.ConnectError if nobody listens."""

        def trace(event: str, values: dict[str, Any]) -> None:
            if event == _CONNECTED and check is not None:
                stream = values["return_value"]
                try:
                    check(_peer(stream))
                except BaseException:
                    stream.close()
                    raise

        check = self._add_token(request)
        if check is not None:
            request.extensions = {**request.extensions, "trace": trace}
        yield request

    async def async_auth_flow(
        self, request: httpx.Request
    ) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Add the token to the request, as `sync_auth_flow` does."""

        async def trace(event: str, values: dict[str, Any]) -> None:
            if event == _CONNECTED and check is not None:
                stream = values["return_value"]
                try:
                    check(_peer(stream))
                except BaseException:
                    await stream.aclose()
                    raise

        check = self._add_token(request)
        if check is not None:
            request.extensions = {**request.extensions, "trace": trace}
        yield request

    def _add_token(self, request: httpx.Request) -> Callable[[tuple[Any, ...]], None] | None:
        """The check of the other end of a new connection; None: there is none."""
        credential = self._find()
        if credential is None:
            return None
        request.headers["Authorization"] = f"Bearer {credential.token}"
        known = loopback_port(self._address) is not None and TABLES[0].exists()
        if credential.uid is None or not known:
            return None
        return functools.partial(refuse_foreign, self._address, credential.uid)


def refuse_foreign(address: str, uid: int, peer: tuple[Any, ...]) -> None:
    """Raises ForeignServer if the process that listens at `peer` is another user's, neither `uid`
    nor root; httpx.ConnectError if nobody does any more."""
    there = [(ip, user) for ip, of, user in _listeners() if of == peer[1]]
    users = _users_at(_plain(peer[0]), there)
    if not users:
        raise httpx.ConnectError("the process that listened has ended")
    if users - {uid, 0}:
        raise ForeignServer(
            f"the process that listens at {address} is not of user {_name(uid)} but of "
            f"{', '.join(map(_name, sorted(users)))}: no token is sent to it. Is the server down, "
            "or is its port another user's? `holdfast config` shows where the token is from"
        )


def _peer(stream: Any) -> tuple[Any, ...]:
    """The other end of a connection of httpcore."""
    address: tuple[Any, ...] = stream.get_extra_info("socket").getpeername()
    return address


def _place(address: str) -> object:
    """Addresses of one server have one place: `localhost` is any address of loopback."""
    port = loopback_port(address)
    return address if port is None else (urlsplit(address).scheme, port)


def _users_at(host: IpAddress, there: Collection[tuple[IpAddress, int]]) -> set[int]:
    """The users whose sockets get connections to this address of loopback: sockets of the very
    address, else those of all addresses. A socket of another address, which any user may open, says
    nothing."""
    return {uid for of, uid in there if of == host} or {
        uid for of, uid in there if of.is_unspecified and host.version <= of.version
    }


def _listeners() -> Iterator[tuple[IpAddress, int, int]]:
    """Address, port and user of each listening TCP socket of this network namespace."""
    for end in tcp_ends():
        if end.state == LISTENS:
            ip, _, port = end.local.rpartition(":")
            yield _plain(_packed(ip)), int(port, 16), end.uid


def _packed(shown: str) -> bytes:
    """An address as the kernel shows it: words of four bytes in the order of this machine."""
    words = (int(shown[at : at + 8], 16) for at in range(0, len(shown), 8))
    return b"".join(word.to_bytes(4, sys.byteorder) for word in words)


def _plain(ip: str | bytes) -> IpAddress:
    """The address; an IPv4 address in IPv6's form becomes a plain one."""
    found = ipaddress.ip_address(ip)
    return getattr(found, "ipv4_mapped", None) or found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
