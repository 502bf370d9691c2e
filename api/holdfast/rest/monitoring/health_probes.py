"""`/healthz` and `/readyz`: whether the process is alive, and whether it can serve."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from holdfast.rest.http.problems import ProblemError, documented
from holdfast.rest.services import Probe, Services, ServicesDep
from holdfast.schemas import Health, Readiness

router = APIRouter(tags=["health"])

OK = "ok"
OPEN: dict[str, Any] = {"security": []}  # for probes of service managers, which have no token


@router.get("/healthz", summary="The process is alive", openapi_extra=OPEN)
async def healthz() -> Health:
    return Health(status=OK)


@router.get(
    "/readyz",
    summary="Database, cluster and reconciler answer",
    responses=documented(503),
    openapi_extra=OPEN,
)
async def readyz(request: Request, services: ServicesDep) -> Readiness:
    checks = await run_probes(services)
    if request.state.principal is None:  # a reason may name hosts, users and paths
        checks = {name: OK if result == OK else "failed" for name, result in checks.items()}
    if services.stopping.is_set():
        checks["server"] = "shutting down"
    failed = [f"{name}: {result}" for name, result in checks.items() if result != OK]
    if failed:
        raise ProblemError(503, "not_ready", "; ".join(failed), checks=checks)
    return Readiness(status="ready", checks=checks)


async def run_probes(services: Services) -> dict[str, str]:
    """`OK` or the problem, by part of the control plane."""
    names = list(services.probes)
    problems = await asyncio.gather(
        *(_run_probe(services.probes[name], services.probe_timeout_s) for name in names)
    )
    return {name: problem or OK for name, problem in zip(names, problems, strict=True)}


async def _run_probe(probe: Probe, timeout_s: float) -> str | None:
    try:
        return await asyncio.wait_for(probe(), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except Exception as error:  # any exception of a probe is its result
        return f"{type(error).__name__}: {error}"
