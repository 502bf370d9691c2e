"""The servers of this user on this machine, by the files that they keep open.

It reads the kernel's list of processes and connects to nothing; elsewhere than on Linux it finds
none.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.client import address
from holdfast.errors import HoldfastError
from holdfast.schemas import SERVER_FILE, ServerFile


def own_servers() -> list[ServerFile]:
    """The running servers of this user."""
    found: dict[int, ServerFile] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            mine = process.stat().st_uid == os.getuid()
            if not mine or b"\0serve\0" not in (process / "cmdline").read_bytes():
                continue
            for folder in {link.readlink().parent for link in (process / "fd").iterdir()}:
                server = _server_of(folder)
                if server is not None and server.pid == int(process.name):
                    found[server.pid] = server
    return list(found.values())


def _server_of(folder: Path) -> ServerFile | None:
    """The server with this data directory. A process keeps files open in folders of others, too,
    who may have written one there: theirs is not read, and nothing that keeps a reader waiting."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError, ValueError):
        if not folder.is_absolute():  # a pipe or a socket
            return None
        with os.fdopen(os.open(folder / SERVER_FILE, flags)) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                server = ServerFile.model_validate_json(file.read())
                return server if Path(server.data_dir).resolve() == folder.resolve() else None
    return None


def choice_of(folder: str | Path) -> str:
    """What a shell gets so that commands find the server with this data directory."""
    return f"export {address.DATA_DIR_VARIABLE}={shlex.quote(str(folder))}"


def others_lines() -> Iterator[str]:
    """The servers that commands do not find by themselves, each with the line that chooses it."""
    try:
        found = address.find().address
    except HoldfastError:
        return
    first = (address.ADDRESS_VARIABLE, address.CONTEXT_VARIABLE)  # they win over the folder
    unset = "".join(f"unset {name}; " for name in first if os.environ.get(name))
    for server in own_servers():
        if address.normal(server.address) != found:
            yield f"a server of yours runs at {server.address}; for its jobs, type here:"
            yield f"  {unset}{choice_of(server.data_dir)}"
