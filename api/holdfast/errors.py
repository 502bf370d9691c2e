"""What the client raises: one tree, told apart by type in Python and by `code` everywhere."""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """Root of all errors of the client. `code` is stable."""

    code = "error"


class ServerUnreachable(HoldfastError):
    """No server answered, after retries."""

    code = "server_unreachable"


class WaitTimeout(HoldfastError):
    """The job had not ended when the time allowed for waiting was over."""

    code = "wait_timeout"


class ApiError(HoldfastError):
    """The server answered with a problem (RFC 9457)."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.problem = problem
        self.code = str(problem.get("code", "unknown"))
        self.status = int(problem.get("status", 0))
        super().__init__(problem.get("detail") or problem.get("title") or self.code)


class InvalidSpec(ApiError):
    """The spec, or another document, is impossible; `faults` names everything that is wrong.

    As text it has a line for each of them.
    """

    @property
    def faults(self) -> list[dict[str, str]]:
        return list(self.problem.get("faults") or [])

    @property
    def summary(self) -> str:
        """Its first line."""
        return super().__str__()

    def __str__(self) -> str:
        faults = (f"  {fault['path'] or 'spec'}: {fault['message']}" for fault in self.faults)
        return "\n".join((self.summary, *faults))


class NotFound(ApiError):
    pass


class Conflict(ApiError):
    """It cannot be done in the present state: the job ended, the key was used otherwise, ..."""


class ServerError(ApiError):
    """The server failed or is not ready."""


def unfinished(why: str) -> ServerError:
    """What a stream of the server ended with, instead of its result."""
    return ServerError({"status": 503, "code": "storage_unavailable", "detail": why})


def from_problem(problem: dict[str, Any]) -> ApiError:
    """The error that a problem stands for."""
    status = int(problem.get("status", 0))
    if problem.get("code") in ("invalid_spec", "invalid_fault"):
        return InvalidSpec(problem)
    if status >= 500:
        return ServerError(problem)
    return {404: NotFound, 409: Conflict}.get(status, ApiError)(problem)
