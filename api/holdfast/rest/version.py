"""`/version`: the versions of the server and of its API."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

from fastapi import APIRouter

from holdfast.schemas import Version
from holdfast_service.extras import DISTRIBUTION
from holdfast_workers import build

router = APIRouter(tags=["health"])

API_VERSION = "v1"


@lru_cache
def server_version() -> str:
    return version(DISTRIBUTION)


@router.get("/version", summary="The versions of the server and of its API")
async def get_version() -> Version:
    return Version(version=server_version(), api=API_VERSION, build=build.LOADED)
