"""The section `runtime_env` of a job spec: the Python packages that a job adds to its nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from holdfast_workers.packages.requirements import fault_of
from holdfast_workers.spec import Section


def _valid(requirement: str) -> str:
    if (fault := fault_of(requirement)) is not None:
        raise PydanticCustomError("requirement", "{fault}", {"fault": fault})
    return requirement


PipRequirement = Annotated[str, Field(max_length=1000), AfterValidator(_valid)]


class RuntimeEnvSpec(Section):
    """Packages that the job's ranks need beside those of every node. The job's files are `code`."""

    pip: list[PipRequirement] = Field(
        default_factory=list,
        max_length=1000,
        description="Python packages, such as `einops>=0.8`. Before the job takes nodes, one of "
        "them finds the exact versions and installs them; each node of the job then installs the "
        "same, once. The versions of what Holdfast, torch and Ray need do not change: a "
        "requirement that excludes them ends the job. Of a package at an address, the nodes "
        "install the file with the sha256 that the first one found, or that the address ends in "
        "(`#sha256=`); an address has no user and no password. The command line and the client "
        "accept a local requirements file here.",
    )
