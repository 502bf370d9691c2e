"""Finds the address of the server, and reports where it was configured.

In this order: the argument; HOLDFAST_ADDRESS; a context by argument or HOLDFAST_CONTEXT; the
`server.json` of a given data directory; the current context; the `server.json` in
~/.holdfast; port 8642 of this machine.

The token of a server on this machine is in its `server.json`, too. A token that is meant for one
server is never sent to another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.client import config, credentials
from holdfast.client.credentials import Credential
from holdfast.schemas import SERVER_FILE, ServerFile

DEFAULT_ADDRESS = "http://127.0.0.1:8642"
ADDRESS_VARIABLE = "HOLDFAST_ADDRESS"
CONTEXT_VARIABLE = "HOLDFAST_CONTEXT"
DATA_DIR_VARIABLE = "HOLDFAST_DATA_DIR"
TOKEN_VARIABLE = "HOLDFAST_TOKEN"


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and how its token is found."""

    address: str
    """Base URL, without a slash at its end."""
    source: str
    """Where the address was configured, as text."""
    find_credential: Callable[[], Credential | None]
    """Finds the token of the address at present: a server of this machine may start later. Raises
    InvalidConfig."""


def resolve(address: str | None = None, data_dir: Path | None = None) -> str:
    """The base URL of the server, without a slash at its end."""
    return find(address, data_dir=data_dir).address


def find(
    address: str | None = None,
    *,
    context: str | None = None,
    data_dir: Path | None = None,
    token: str | None = None,
) -> ServerAddress:
    """The chosen server and its token. Raises InvalidConfig.

    The token of a context is sent to the address of that context only.
    """
    found, source = _first_candidate(address, context, data_dir)
    found = normal(found)
    return ServerAddress(found, source, partial(_credential, found, data_dir, token))


def _credential(address: str, data_dir: Path | None, token: str | None) -> Credential | None:
    """Raises InvalidConfig."""
    if token is not None:
        return Credential(token, "argument") if token else None
    for folder in (data_dir, os.environ.get(DATA_DIR_VARIABLE), _home()):
        if folder and (found := credentials.in_folder(Path(folder), address)):
            return found
    if given := os.environ.get(TOKEN_VARIABLE):
        return Credential(given, TOKEN_VARIABLE, os.getuid())
    for name, known in config.load().contexts.items():
        if known.token is not None and normal(known.address) == address:
            return Credential(known.token, f"context {name}", known.uid)
    return None


def normal(address: str) -> str:
    """Turn `127.0.0.1:8642/` into `http://127.0.0.1:8642`."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _first_candidate(
    address: str | None, context: str | None, data_dir: Path | None
) -> tuple[str, str]:
    return next(_candidates(address, context, data_dir))


def _candidates(
    address: str | None, context: str | None, data_dir: Path | None
) -> Iterator[tuple[str, str]]:
    """The configured addresses with their origins, evaluated one by one; the first one counts."""
    if address:
        yield address, "argument"
    if context is None and (given := os.environ.get(ADDRESS_VARIABLE)):
        yield given, ADDRESS_VARIABLE
    if name := context or os.environ.get(CONTEXT_VARIABLE):
        yield config.load().context(name).address, f"context {name}"
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if folder and (stored_address := _address_in(Path(folder))):
        yield stored_address, str(Path(folder) / SERVER_FILE)
    stored = config.load()
    if stored.current is not None:
        yield stored.context(stored.current).address, f"context {stored.current}"
    home = _home()
    if not folder and (stored_address := _address_in(home)):
        yield stored_address, str(home / SERVER_FILE)
    yield DEFAULT_ADDRESS, "default"


def _home() -> Path:
    return Path.home() / ".holdfast"


def _address_in(folder: Path) -> str | None:
    try:
        return ServerFile.model_validate_json((folder / SERVER_FILE).read_text()).address
    except (OSError, ValueError):
        return None
