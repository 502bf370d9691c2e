"""The token of a server, and the check that this server is the one to send it to.

Every user of a machine can listen on its ports, also on one that a server of this user had or will
have. The kernel reports who listens, and a token is sent to no other.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from holdfast.errors import ForeignServer, InvalidConfig
from holdfast.schemas import SERVER_FILE, ServerFile

_LISTENS = "0A"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_OTHERS_MASK = 0o077
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOCALHOST = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))


@dataclass(frozen=True)
class Credential:
    """A token, where it was found, and the user whose server may get it."""

    token: str
    source: str
    uid: int | None = None
    """Of the process that must listen on this machine; None: any."""


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
    if server.address != address or server.token is None:
        return None
    if status.st_mode & _OTHERS_MASK:
        raise InvalidConfig(
            f"{path} is refused, because other users can read its token: chmod 600 {path}, remove "
            "the file `token` beside it, and start the server again"
        )
    return Credential(server.token, str(path), status.st_uid)


def listener_of(address: str) -> int | None:
    """The user of the process that listens at an address of this machine, -1 if there are several;
    None if nobody does, if the address is elsewhere, or if the system cannot tell."""
    port, users = loopback_port(address), set[int]()
    if port is not None:
        name = urlsplit(address).hostname or ""
        hosts = _LOCALHOST if name == "localhost" else (ipaddress.ip_address(name),)
        there = [(host, uid) for host, of, uid in _listeners() if of == port]
        users = {uid for host in hosts for uid in _users_at(host, there)}
    return None if not users else users.pop() if len(users) == 1 else -1


def loopback_port(address: str) -> int | None:
    """The port, if the address is of loopback."""
    try:
        parts = urlsplit(address)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        return None
    if host != "localhost":
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return None
        except ValueError:
            return None
    return port or (443 if parts.scheme == "https" else 80)


class BearerToken(httpx.Auth):
    """Adds the token to each request. It is looked up each time: the server may start later."""

    def __init__(self, address: str, find: Callable[[], Credential | None]) -> None:
        self._address, self._find = address, find

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Raises ForeignServer; httpx.ConnectError if nobody listens."""
        credential = self._find()
        if credential is not None:
            if credential.uid is not None:
                refuse_foreign(self._address, credential.uid)
            request.headers["Authorization"] = f"Bearer {credential.token}"
        yield request


def refuse_foreign(address: str, uid: int) -> None:
    """Raises ForeignServer if the process that listens at this address of this machine is another
    user's; httpx.ConnectError if nobody listens."""
    if loopback_port(address) is None or not _TABLES[0].exists():
        return
    found = listener_of(address)
    if found is None:
        raise httpx.ConnectError("Connection refused")
    if found != uid:
        raise ForeignServer(
            f"the process that listens at {address} is not of user {_name(uid)} but of "
            f"{'several users' if found < 0 else _name(found)}: no token is sent to it. Is the "
            "server down, or is its port used twice? Start it with another --port"
        )


def _users_at(host: _Address, there: Collection[tuple[_Address, int]]) -> set[int]:
    """Whose sockets get connections to this address of loopback: that of the very address, else one
    of all addresses. A socket of another address, which any user may open, says nothing."""
    return {uid for of, uid in there if of == host} or {
        uid for of, uid in there if of.is_unspecified and host.version <= of.version
    }


def _listeners() -> Iterator[tuple[_Address, int, int]]:
    """Address, port and user of each listening TCP socket of this network namespace."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_, uid = line.split()[:8]
            if state == _LISTENS:
                host, _, port = local.rpartition(":")
                yield _address(host), int(port, 16), int(uid)


def _address(shown: str) -> _Address:
    """Of the kernel's table: words of four bytes in the machine's order."""
    words = [int(shown[start : start + 8], 16) for start in range(0, len(shown), 8)]
    found = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return getattr(found, "ipv4_mapped", None) or found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
