"""Finds the server: what was given, the environment, the data directory's `server.json`, 8642."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.schemas import SERVER_FILE, ServerFile

DEFAULT_ADDRESS = "http://127.0.0.1:8642"
ADDRESS_VARIABLE = "HOLDFAST_ADDRESS"
DATA_DIR_VARIABLE = "HOLDFAST_DATA_DIR"


def resolve(address: str | None = None, data_dir: Path | None = None) -> str:
    """The base URL to talk to, without a slash at its end."""
    found = address or os.environ.get(ADDRESS_VARIABLE) or _written(data_dir) or DEFAULT_ADDRESS
    if "://" not in found:
        found = f"http://{found}"
    return found.rstrip("/")


def _written(data_dir: Path | None) -> str | None:
    folder = data_dir or Path(os.environ.get(DATA_DIR_VARIABLE) or Path.home() / ".holdfast")
    try:
        return ServerFile.model_validate_json((folder / SERVER_FILE).read_text()).address
    except (OSError, ValueError):
        return None
