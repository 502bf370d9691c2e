"""Holdfast: what people and programs touch (REST app, client, CLI). Light to import."""

from holdfast.client import Client
from holdfast.errors import (
    ApiError,
    Conflict,
    HoldfastError,
    InvalidSpec,
    NotFound,
    ServerError,
    ServerUnreachable,
    WaitTimeout,
)

__all__ = [
    "ApiError",
    "Client",
    "Conflict",
    "HoldfastError",
    "InvalidSpec",
    "NotFound",
    "ServerError",
    "ServerUnreachable",
    "WaitTimeout",
]
