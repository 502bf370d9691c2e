"""The errors of the client: one tree of exceptions, each with a stable `code`.

Every `code` of the server has its own type, a subclass of the type of its HTTP status: `JobEnded`
is a `Conflict`. A code that this client does not know becomes the type of its status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class HoldfastError(Exception):
    """Root of all errors of the client. `code` is stable."""

    code = "error"


class ServerUnreachable(HoldfastError):
    """No server answered, after retries."""

    code = "server_unreachable"


class WaitTimeout(HoldfastError):
    """The job had not ended at the end of the allowed waiting time."""

    code = "wait_timeout"


class JobFailed(HoldfastError):
    """A job ended without success; `code` is that of its outcome."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AmbiguousName(HoldfastError):
    """Several jobs match the given name or start of an id; `candidates` are their ids."""

    code = "ambiguous_name"
    status = 400

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class InvalidConfig(HoldfastError):
    """The user's configuration file is unusable or lacks a context, or an address is invalid.

    The message contains a remedy.
    """

    code = "invalid_config"
    status = 400


class ApiError(HoldfastError):
    """The server answered with a problem (RFC 9457)."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.problem = problem
        self.code = str(problem.get("code", "unknown"))
        self.status = int(problem.get("status", 0))
        super().__init__(problem.get("detail") or problem.get("title") or self.code)

    @property
    def faults(self) -> list[dict[str, str]]:
        """Every fault, as `path` and `message`; most errors have none."""
        return list(self.problem.get("faults") or [])

    @property
    def summary(self) -> str:
        """The first line of the message."""
        return super().__str__()

    def __str__(self) -> str:
        faults = (f"  {fault['path'] or 'spec'}: {fault['message']}" for fault in self.faults)
        return "\n".join((self.summary, *faults))


class InvalidSpec(ApiError):
    """The spec, or another document, is invalid; `faults` lists everything that is wrong.

    Its text has a line for each fault.
    """


class InvalidFault(InvalidSpec):
    """The requested fault is invalid for the job."""


class InvalidParameters(ApiError):
    """Some parameters of the request are invalid; `faults` lists them."""


class InvalidRegex(InvalidParameters):
    """A filter is not a regular expression that the server supports."""


class Unauthorized(ApiError):
    """The server requires a valid token: `holdfast login`."""


class Forbidden(ApiError):
    """The server does not allow the request."""


class InjectionDisabled(Forbidden):
    """The server does not allow fault injection."""


class NotFound(ApiError):
    """The requested object does not exist."""


class JobNotFound(NotFound):
    """There is no such job."""


class NodeNotFound(NotFound):
    """There is no such node."""


class CheckpointNotFound(NotFound):
    """The job has no such checkpoint."""


class UnknownMetric(NotFound):
    """The job has no such metric."""


class Conflict(ApiError):
    """Not possible in the present state: the job has ended, the key was used before, ..."""


class JobEnded(Conflict):
    """The job has ended and cannot change any more."""


class IdempotencyConflict(Conflict):
    """The idempotency key was used for another document."""


class CheckpointPinned(Conflict):
    """The checkpoint is pinned and cannot be removed."""


class CheckpointNeeded(Conflict):
    """Another job is going to start from the checkpoint."""


class CheckpointBad(Conflict):
    """The checkpoint's bytes differ from those that were saved."""


class LastCheckpoint(Conflict):
    """It is the only checkpoint that an active job could continue from."""


class ServerError(ApiError):
    """The server failed or is not ready."""


class NotReady(ServerError):
    """A part of the control plane is not ready; the problem's `checks` has the details."""


class StorageUnavailable(ServerError):
    """The checkpoint storage did not answer the server."""


BY_CODE: dict[str, type[ApiError]] = {
    "invalid_spec": InvalidSpec,
    "invalid_fault": InvalidFault,
    "invalid_parameters": InvalidParameters,
    "invalid_regex": InvalidRegex,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "injection_disabled": InjectionDisabled,
    "job_not_found": JobNotFound,
    "node_not_found": NodeNotFound,
    "checkpoint_not_found": CheckpointNotFound,
    "unknown_metric": UnknownMetric,
    "job_ended": JobEnded,
    "idempotency_conflict": IdempotencyConflict,
    "checkpoint_pinned": CheckpointPinned,
    "checkpoint_needed": CheckpointNeeded,
    "checkpoint_bad": CheckpointBad,
    "last_checkpoint": LastCheckpoint,
    "not_ready": NotReady,
    "storage_unavailable": StorageUnavailable,
}
BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
}


def unfinished(why: str) -> ServerError:
    """The error of a stream that ended without its result."""
    return StorageUnavailable({"status": 503, "code": "storage_unavailable", "detail": why})


def from_problem(problem: dict[str, Any]) -> ApiError:
    """The exception of a problem document."""
    status = int(problem.get("status", 0))
    kind = BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    known = BY_CODE.get(str(problem.get("code")), kind)
    return (known if issubclass(known, kind) else kind)(problem)
