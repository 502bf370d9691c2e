"""What the client raises: one tree, told apart by type in Python and by `code` everywhere.

Every `code` that a server answers with has a type of its own, below the type of its kind:
`JobEnded` is a `Conflict`. A code that this client does not know yet becomes the type of its kind.
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
    """The job had not ended when the time allowed for waiting was over."""

    code = "wait_timeout"


class JobFailed(HoldfastError):
    """A job that was waited for did not succeed; `code` says why, as its outcome does."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AmbiguousName(HoldfastError):
    """Several jobs go by the name, or begin with the id, that was given; it names them."""

    code = "ambiguous_name"
    status = 400

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class InvalidConfig(HoldfastError):
    """The user's configuration file cannot be used, or has no such context; or an address is none.

    Says what to do.
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
        """Every single thing that is wrong, as `path` and `message`; most errors have none."""
        return list(self.problem.get("faults") or [])

    @property
    def summary(self) -> str:
        """Its first line."""
        return super().__str__()

    def __str__(self) -> str:
        faults = (f"  {fault['path'] or 'spec'}: {fault['message']}" for fault in self.faults)
        return "\n".join((self.summary, *faults))


class InvalidSpec(ApiError):
    """The spec, or another document, is impossible; `faults` names everything that is wrong.

    As text it has a line for each of them.
    """


class InvalidFault(InvalidSpec):
    """The fault that was to be injected is impossible for the job."""


class InvalidParameters(ApiError):
    """Some parameters of the request are impossible; `faults` names them."""


class InvalidRegex(InvalidParameters):
    """A filter is no regular expression that the server understands."""


class Unauthorized(ApiError):
    """The server wants a token, or another one: `holdfast login`."""


class Forbidden(ApiError):
    """The server does not allow it."""


class InjectionDisabled(Forbidden):
    """The server does not let anybody break things on purpose."""


class NotFound(ApiError):
    """There is no such thing."""


class JobNotFound(NotFound):
    pass


class NodeNotFound(NotFound):
    pass


class CheckpointNotFound(NotFound):
    pass


class UnknownMetric(NotFound):
    pass


class Conflict(ApiError):
    """It cannot be done in the present state: the job ended, the key was used otherwise, ..."""


class JobEnded(Conflict):
    """The job has ended: nothing changes it any more."""


class IdempotencyConflict(Conflict):
    """The idempotency key was used for another document."""


class CheckpointPinned(Conflict):
    pass


class CheckpointNeeded(Conflict):
    """Another job is to begin with that checkpoint."""


class CheckpointBad(Conflict):
    """The checkpoint's bytes are not those that were saved."""


class LastCheckpoint(Conflict):
    """It is all that a living job could go on from."""


class ServerError(ApiError):
    """The server failed or is not ready."""


class NotReady(ServerError):
    """A part of the control plane is not well; the problem's `checks` says which."""


class StorageUnavailable(ServerError):
    """The storage of checkpoints did not answer the server."""


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
    """What a stream of the server ended with, instead of its result."""
    return StorageUnavailable({"status": 503, "code": "storage_unavailable", "detail": why})


def from_problem(problem: dict[str, Any]) -> ApiError:
    """The error that a problem stands for."""
    status = int(problem.get("status", 0))
    kind = BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    known = BY_CODE.get(str(problem.get("code")), kind)
    return (known if issubclass(known, kind) else kind)(problem)
