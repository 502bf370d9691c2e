"""Answers for a node that reports that no agent can run there, in place of that agent.

The node takes part without ranks: its health finding keeps them away, and names the node, what is
missing, and what to do. An agent that has its software and fails all the same is reported as such:
its node is not at fault for other jobs. Nothing runs there, so every attempt is over on the node.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

from holdfast_service.cluster.code_by_value import own_versions
from holdfast_service.diagnosis.unfit_software import SoftwareFault, import_fault, version_fault
from holdfast_workers import build
from holdfast_workers.protocol.answers import AgentFailure, AgentReport, Refusal, RequestRefused
from holdfast_workers.protocol.commands import CheckNode, Describe, Fence, Hello, Request
from holdfast_workers.protocol.findings import SOFTWARE, HealthFinding, HealthReport, Level


@cache
def requirement_of(module: str) -> str:
    """The package that this process has for a top-level module, with its version; "": none.
    Looked up once per module: that reads many files."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return f"{names[0]}=={importlib.metadata.version(names[0])}" if names else ""


def answer_of(
    seat: str, request: Request, refusal: dict[str, Any], *, sends_code: bool
) -> AgentReport:
    """The answer to a request that the node of `seat` could not take. Raises RequestRefused for
    work."""
    fault = _fault(refusal, sends_code)
    node, host = str(refusal["node_id"]), str(refusal["host"])
    what = f"{host} (node {node[:12]}): {fault}"
    match request.command:
        case Fence(attempt=number):
            attempt = number
        case Hello() | Describe() | CheckNode():
            attempt = 0
        case _:
            raise RequestRefused(Refusal("UnusableNode", what))
    lacks_software = bool(refusal["lacks_software"])
    finding = HealthFinding(SOFTWARE, fault.what, Level.UNFIT, what, lost=True)
    return AgentReport(
        agent=seat,
        incarnation=str(refusal["incarnation"]),
        node_id=node,
        host=host,
        pid=int(refusal["pid"]),
        data_port=0,
        store_port=0,
        capacity=0,
        epoch=request.epoch,
        attempt=attempt,
        ready=False,
        failure=None if lacks_software else AgentFailure(what),
        health=HealthReport(1, (finding,)) if lacks_software else HealthReport(),
        build=build.LOADED,
    )


def _fault(refusal: dict[str, Any], sends_code: bool) -> SoftwareFault:
    error = str(refusal["error"])
    return (
        version_fault(own_versions(), refusal["versions"])
        or import_fault(error, sends_code=sends_code, requirement_of=requirement_of)
        or SoftwareFault("agent", f"its agent cannot start ({error})", "see Ray's logs there")
    )
