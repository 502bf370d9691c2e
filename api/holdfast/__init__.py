"""Holdfast: what people and programs touch (REST app, client, CLI). Light to import.

The public names of the Python API: the clients, the errors they raise, and `JobSpec`. Each is
loaded when it is first used. The rooms below hand nothing on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.client.async_client import AsyncClient
    from holdfast.client.async_jobs import AsyncJob
    from holdfast.client.client import Client
    from holdfast.client.jobs import Job
    from holdfast.errors import (
        AmbiguousName,
        ApiError,
        Conflict,
        HoldfastError,
        InvalidSpec,
        NotFound,
        ServerError,
        ServerUnreachable,
        WaitTimeout,
    )
    from holdfast_service.job_model.job_spec import JobSpec

_HOMES = {
    "AsyncClient": "holdfast.client.async_client",
    "AsyncJob": "holdfast.client.async_jobs",
    "Client": "holdfast.client.client",
    "Job": "holdfast.client.jobs",
    "JobSpec": "holdfast_service.job_model.job_spec",
}

__all__ = [
    "AmbiguousName",
    "ApiError",
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Conflict",
    "HoldfastError",
    "InvalidSpec",
    "Job",
    "JobSpec",
    "NotFound",
    "ServerError",
    "ServerUnreachable",
    "WaitTimeout",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "holdfast.errors")), name)
