"""`/healthz` and `/readyz`: whether the process lives, and whether it can do its work."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from holdfast.rest.problems import ProblemError, documented
from holdfast.rest.services import Probe, ServicesDep
from holdfast.schemas import Health, Readiness

router = APIRouter(tags=["health"])

OK = "ok"


@router.get("/healthz", response_model=Health, summary="The process lives")
async def healthz() -> Health:
    return Health(status=OK)


@router.get(
    "/readyz",
    response_model=Readiness,
    summary="Database, cluster and reconciler answer",
    responses=documented(503),
)
async def readyz(services: ServicesDep) -> Readiness:
    names = list(services.probes)
    found = await asyncio.gather(
        *(_look(services.probes[name], services.probe_timeout_s) for name in names)
    )
    checks = {name: problem or OK for name, problem in zip(names, found, strict=True)}
    if services.stopping.is_set():
        checks["server"] = "shutting down"
    wrong = [f"{name}: {what}" for name, what in checks.items() if what != OK]
    if wrong:
        raise ProblemError(503, "not_ready", "; ".join(wrong), checks=checks)
    return Readiness(status="ready", checks=checks)


async def _look(probe: Probe, timeout_s: float) -> str | None:
    try:
        return await asyncio.wait_for(probe(), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except Exception as error:  # whatever a part raises is what is wrong with it
        return f"{type(error).__name__}: {error}"
