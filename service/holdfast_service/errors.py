"""The errors of the API, each defined once: the services raise them, REST sends them as problem
documents (RFC 9457), and the client raises them again.

A new error is a class here, with its `code`, below the class of its HTTP status: `JobEnded` is a
`Conflict`. The OpenAPI document lists all codes. This module imports nothing else: the client loads
it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from holdfast_workers.spec import SpecFault


class HoldfastError(Exception):
    """Root of all errors that users see. Its `code` is stable; `status` is that of HTTP, and
    decides the exit code of a command. A class names both in its head; it has those of its base
    otherwise."""

    code = "error"
    status = 500

    def __init_subclass__(cls, *, code: str | None = None, status: int | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code = code
        if status is not None:
            cls.status = status


class ApiError(HoldfastError, code="unknown", status=0):
    """The server refused a request, or failed. `problem`: the document that says so."""

    def __init__(self, detail: str, /, **members: Any) -> None:
        """`members`: further members of the problem; `code` and `status` if the class does not
        define them."""
        super().__init__(detail)
        self.problem: dict[str, Any] = {
            "status": self.status,
            "code": self.code,
            "detail": detail,
            **members,
        }
        self.status, self.code = self.problem["status"], self.problem["code"]

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


# Status 400 and 422: the request is wrong.


class InvalidSpec(ApiError, code="invalid_spec", status=422):
    """The spec, or another document, is invalid; `faults` lists everything that is wrong.

    Its text has a line for each fault.
    """

    _wording: ClassVar[tuple[str, str]] = ("the spec has", "fault")

    @classmethod
    def of(cls, faults: Iterable[SpecFault]) -> Self:
        """The error that reports these faults."""
        listed = [{"path": fault.path, "message": fault.message} for fault in faults]
        start, noun = cls._wording
        plural = "" if len(listed) == 1 else "s"
        return cls(f"{start} {len(listed)} {noun}{plural}", faults=listed)


class InvalidFault(InvalidSpec, code="invalid_fault"):
    """The requested fault is invalid for the job; `faults` lists all problems."""

    _wording = ("the requested fault is invalid:", "problem")


class InvalidParameters(ApiError, code="invalid_parameters", status=422):
    """Some parameters of the request are invalid; `faults` lists them."""


class InvalidRegex(InvalidParameters, code="invalid_regex"):
    """A filter is malformed, too large, or not a regular expression that the server supports."""


class InvalidKey(ApiError, code="invalid_idempotency_key", status=422):
    """The idempotency key is empty or too long."""


class InvalidTime(ApiError, code="invalid_time", status=422):
    """The given time is in the past."""


class CodeRefused(ApiError, code="invalid_code", status=422):
    """The package of code cannot be unpacked on a node."""


class InvalidCursor(ApiError, code="invalid_cursor", status=400):
    """The cursor does not come from this server."""


# Status 401 and 403: the caller may not do this.


class Unauthorized(ApiError, code="unauthorized", status=401):
    """The server requires a valid token: `holdfast login`."""


class Forbidden(ApiError, code="forbidden", status=403):
    """The server does not allow the request."""


class InjectionDisabled(Forbidden, code="injection_disabled"):
    """The server does not allow fault injection."""


# Status 404: the requested object does not exist.


class NotFound(ApiError, code="not_found", status=404):
    """The requested object does not exist."""


class JobNotFound(NotFound, code="job_not_found"):
    """There is no such job."""


class NodeNotFound(NotFound, code="node_not_found"):
    """No node with this name was ever seen, or the prefix matches several nodes."""


class CodeNotFound(NotFound, code="code_not_found"):
    """The server has no code of that digest."""


class CheckpointNotFound(NotFound, code="checkpoint_not_found"):
    """The job has no such checkpoint."""


class OperationNotFound(NotFound, code="operation_not_found"):
    """There is no such operation, or it was removed by age."""


class ContentGone(NotFound, code="content_gone"):
    """The file that the operation made is not on this server any more."""


class UnknownMetric(NotFound, code="unknown_metric"):
    """The job has no such metric."""


# Status 409: the present state does not allow the request.


class Conflict(ApiError, status=409):
    """The request is not possible in the present state: the job has ended, the key was used before,
    ..."""


class JobEnded(Conflict, code="job_ended"):
    """The job has ended and cannot change any more."""


class JobNotEnded(Conflict, code="job_not_ended"):
    """The job has not ended, or has not left the cluster yet."""


class SpecUnreadable(Conflict, code="spec_unreadable"):
    """The job's stored spec was written by another version, and this version cannot read it."""


class NothingToReplay(Conflict, code="nothing_to_replay"):
    """The job has no step that a replay could be compared with."""


class NotAReplay(Conflict, code="not_a_replay"):
    """The job is no replay of another job: there is nothing to compare it with."""


class JobChanged(ApiError, code="job_changed", status=412):
    """Users have changed the job since the generation that `If-Match` names."""


class IdempotencyConflict(Conflict, code="idempotency_conflict"):
    """The idempotency key was used before with another document."""


class CodeStoreFull(Conflict, code="code_store_full"):
    """There is no room for more code until a job ends, or some time has passed."""


class CheckpointPinned(Conflict, code="checkpoint_pinned"):
    """The checkpoint is pinned and cannot be removed."""


class CheckpointElsewhere(Conflict, code="checkpoint_elsewhere"):
    """The checkpoint is not in its job's own folder of the remote tier, and is never removed."""


class CheckpointNeeded(Conflict, code="checkpoint_needed"):
    """Another job is going to start from the checkpoint and has none of its own yet."""


class CheckpointBad(Conflict, code="checkpoint_bad"):
    """The checkpoint's bytes differ from those that were saved."""


class LastCheckpoint(Conflict, code="last_checkpoint"):
    """The checkpoint is the only one in the remote tier that an active job could continue from."""


class CheckpointBeingRemoved(Conflict, code="being_removed"):
    """The checkpoint is being removed."""


class CannotExport(Conflict, code="not_exportable"):
    """The checkpoint cannot be exported in the requested format."""


class DataUnreadable(Conflict, code="data_unreadable"):
    """The tokens of a spec cannot be read: the message says where, and what to do."""


class NoContent(Conflict, code="no_content"):
    """The operation has no file: it makes none, has not ended, failed, or was cancelled."""


class OperationEnded(Conflict, code="operation_ended"):
    """The operation has ended and cannot be cancelled any more."""


class OperationCancelled(Conflict, code="operation_cancelled"):
    """The operation was cancelled."""


# Status 500 and above: the server failed.


class ServerError(ApiError, status=500):
    """The server failed or is not ready."""


class ClusterUnreachable(ServerError, code="cluster_unreachable", status=503):
    """The Ray cluster does not answer at present; try again later."""


class NotReady(ServerError, code="not_ready", status=503):
    """A part of the control plane is not ready; the problem's `checks` has the details."""


class StorageUnavailable(ServerError, code="storage_unavailable", status=503):
    """The storage of the checkpoints failed or did not answer; it may answer later."""


class OperationAbandoned(ServerError, code="operation_abandoned"):
    """Each server that began with the operation ended before it was done."""


def from_problem(problem: dict[str, Any]) -> ApiError:
    """The error that a problem document describes. A code that this version does not know becomes
    the class of its status."""
    code, status = str(problem.get("code", ApiError.code)), int(problem.get("status", 0))
    kind = _OF_STATUS.get(status, ServerError if status >= 500 else ApiError)
    known = _OF_CODE.get(code, kind)
    chosen = known if issubclass(known, kind) else kind
    detail = problem.get("detail") or problem.get("title") or code
    return chosen(detail, **{**problem, "code": code, "status": status})


def statuses() -> dict[str, int]:
    """The status of each code of the API. Programs depend on them: they never change."""
    return {code: kind.status for code, kind in _OF_CODE.items() if kind is not ApiError}


def _with_codes(kind: type[ApiError]) -> dict[str, type[ApiError]]:
    """The classes below `kind` that define a code, by their codes."""
    found = {kind.code: kind} if "code" in vars(kind) else {}
    for below in kind.__subclasses__():
        found |= _with_codes(below)
    return found


_OF_CODE = _with_codes(ApiError)
_OF_STATUS = {kind.status: kind for kind in (Unauthorized, Forbidden, NotFound, Conflict)}
