"""The interfaces of Holdfast: the REST app, the client, the CLI. Light to import.

This package exports the public names of the Python API: the clients, their errors, `JobSpec`, and
`attach`, by which a user's program shows its steps. Each is loaded at its first use. The packages
below export nothing in their `__init__`, but for `torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.client.asynchronous.jobs import AsyncClient, AsyncJob
    from holdfast.client.synchronous.jobs import Client, Job
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
    from holdfast_workers.programs.attachment import attach

_MODULES = {
    "AsyncClient": "holdfast.client.asynchronous.jobs",
    "AsyncJob": "holdfast.client.asynchronous.jobs",
    "Client": "holdfast.client.synchronous.jobs",
    "Job": "holdfast.client.synchronous.jobs",
    "JobSpec": "holdfast_service.job_model.job_spec",
    "attach": "holdfast_workers.programs.attachment",
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
    "attach",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "holdfast.errors")), name)
