"""The Python client of the REST API. Loads neither Ray nor torch nor the server's framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.client.async_client import AsyncClient
    from holdfast.client.async_jobs import AsyncJob
    from holdfast.client.calls import LogFilter
    from holdfast.client.client import Client
    from holdfast.client.jobs import Job

_LATE = {  # when first used: what names of jobs mean is asked for without a server, too
    "AsyncClient": "async_client",
    "AsyncJob": "async_jobs",
    "Client": "client",
    "Job": "jobs",
    "LogFilter": "calls",
}

__all__ = ["AsyncClient", "AsyncJob", "Client", "Job", "LogFilter"]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
