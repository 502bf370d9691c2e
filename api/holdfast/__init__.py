"""Holdfast: what people and programs touch (REST app, client, CLI). Light to import.

`Client` and `AsyncClient` speak to a server; what they raise is here by name, too, and so is
`JobSpec`. Each is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.client import AsyncClient, AsyncJob, Client, Job
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
    from holdfast_service.job_spec import JobSpec

_CLIENT = ("AsyncClient", "AsyncJob", "Client", "Job")
_SPEC = "JobSpec"

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
    if name == _SPEC:
        home = "holdfast_service.job_spec"
    else:
        home = "holdfast.client" if name in _CLIENT else "holdfast.errors"
    return getattr(importlib.import_module(home), name)
