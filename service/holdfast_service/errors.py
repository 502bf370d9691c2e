"""The errors of the API, each defined once: the services raise them, REST sends them as problem
documents (RFC 9457), and the client raises them again.

Every error has a stable `code`. Its base is the class of its HTTP status: `JobEnded` is a
`Conflict`. This module imports nothing else: the client loads it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from holdfast_workers.spec import SpecFault


class HoldfastError(Exception):
    """Root of all errors that users see. `code` is stable."""

    code = "error"


class ApiError(HoldfastError):
    """The server refused a request, or failed. `problem`: the document that says so."""

    code = "unknown"
    status = 0

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


class InvalidSpec(ApiError):
    """The spec, or another document, is invalid; `faults` lists everything that is wrong.

    Its text has a line for each fault.
    """

    code = "invalid_spec"
    status = 422
    _wording: ClassVar[tuple[str, str]] = ("the spec has", "fault")

    @classmethod
    def of(cls, faults: Iterable[SpecFault]) -> Self:
        """The error that reports these faults."""
        listed = [{"path": fault.path, "message": fault.message} for fault in faults]
        start, noun = cls._wording
        plural = "" if len(listed) == 1 else "s"
        return cls(f"{start} {len(listed)} {noun}{plural}", faults=listed)


class InvalidFault(InvalidSpec):
    """The requested fault is invalid for the job; `faults` lists all problems."""

    code = "invalid_fault"
    _wording = ("the requested fault is invalid:", "problem")


class InvalidParameters(ApiError):
    """Some parameters of the request are invalid; `faults` lists them."""

    code = "invalid_parameters"
    status = 422


class InvalidRegex(InvalidParameters):
    """A filter is malformed, too large, or not a regular expression that the server supports."""

    code = "invalid_regex"


class InvalidKey(ApiError):
    """The idempotency key is empty or too long."""

    code = "invalid_idempotency_key"
    status = 422


class InvalidTime(ApiError):
    """The given time is in the past."""

    code = "invalid_time"
    status = 422


class CodeRefused(ApiError):
    """The package of code cannot be unpacked on a node."""

    code = "invalid_code"
    status = 422


class InvalidCursor(ApiError):
    """The cursor does not come from this server."""

    code = "invalid_cursor"
    status = 400


# Status 401 and 403: the caller may not do this.


class Unauthorized(ApiError):
    """The server requires a valid token: `holdfast login`."""

    code = "unauthorized"
    status = 401


class Forbidden(ApiError):
    """The server does not allow the request."""

    code = "forbidden"
    status = 403


class InjectionDisabled(Forbidden):
    """The server does not allow fault injection."""

    code = "injection_disabled"


# Status 404: the requested object does not exist.


class NotFound(ApiError):
    """The requested object does not exist."""

    code = "not_found"
    status = 404


class JobNotFound(NotFound):
    """There is no such job."""

    code = "job_not_found"


class NodeNotFound(NotFound):
    """No node with this name was ever seen, or the prefix matches several nodes."""

    code = "node_not_found"


class CodeNotFound(NotFound):
    """The server has no code of that digest."""

    code = "code_not_found"


class CheckpointNotFound(NotFound):
    """The job has no such checkpoint."""

    code = "checkpoint_not_found"


class OperationNotFound(NotFound):
    """There is no such operation, or it was removed by age."""

    code = "operation_not_found"


class ContentGone(NotFound):
    """The file that the operation made is not on this server any more."""

    code = "content_gone"


class UnknownMetric(NotFound):
    """The job has no such metric."""

    code = "unknown_metric"


# Status 409: the present state does not allow the request.


class Conflict(ApiError):
    """The request is not possible in the present state: the job has ended, the key was used before,
    ..."""

    status = 409


class JobEnded(Conflict):
    """The job has ended and cannot change any more."""

    code = "job_ended"


class JobNotEnded(Conflict):
    """The job has not ended, or has not left the cluster yet."""

    code = "job_not_ended"


class SpecUnreadable(Conflict):
    """The job's stored spec was written by another version, and this version cannot read it."""

    code = "spec_unreadable"


class NothingToReplay(Conflict):
    """The job has no step that a replay could be compared with."""

    code = "nothing_to_replay"


class NotAReplay(Conflict):
    """The job is no replay of another job: there is nothing to compare it with."""

    code = "not_a_replay"


class JobChanged(ApiError):
    """Users have changed the job since the generation that `If-Match` names."""

    code = "job_changed"
    status = 412


class IdempotencyConflict(Conflict):
    """The idempotency key was used before with another document."""

    code = "idempotency_conflict"


class CodeStoreFull(Conflict):
    """There is no room for more code until a job ends, or some time has passed."""

    code = "code_store_full"


class CheckpointPinned(Conflict):
    """The checkpoint is pinned and cannot be removed."""

    code = "checkpoint_pinned"


class CheckpointElsewhere(Conflict):
    """The checkpoint is not in its job's own folder of the remote tier, and is never removed."""

    code = "checkpoint_elsewhere"


class CheckpointNeeded(Conflict):
    """Another job is going to start from the checkpoint and has none of its own yet."""

    code = "checkpoint_needed"


class CheckpointBad(Conflict):
    """The checkpoint's bytes differ from those that were saved."""

    code = "checkpoint_bad"


class LastCheckpoint(Conflict):
    """The checkpoint is the only one in the remote tier that an active job could continue from."""

    code = "last_checkpoint"


class CheckpointBeingRemoved(Conflict):
    """The checkpoint is being removed."""

    code = "being_removed"


class CannotExport(Conflict):
    """The checkpoint cannot be exported in the requested format."""

    code = "not_exportable"


class NoContent(Conflict):
    """The operation has no file: it makes none, has not ended, failed, or was cancelled."""

    code = "no_content"


class OperationEnded(Conflict):
    """The operation has ended and cannot be cancelled any more."""

    code = "operation_ended"


class OperationCancelled(Conflict):
    """The operation was cancelled."""

    code = "operation_cancelled"


# Status 500 and above: the server failed.


class ServerError(ApiError):
    """The server failed or is not ready."""

    status = 500


class ClusterUnreachable(ServerError):
    """The Ray cluster does not answer at present; try again later."""

    code = "cluster_unreachable"
    status = 503


class NotReady(ServerError):
    """A part of the control plane is not ready; the problem's `checks` has the details."""

    code = "not_ready"
    status = 503


class StorageUnavailable(ServerError):
    """The storage of the checkpoints failed or did not answer; it may answer later."""

    code = "storage_unavailable"
    status = 503


class OperationAbandoned(ServerError):
    """Each server that began with the operation ended before it was done."""

    code = "operation_abandoned"


def from_problem(problem: dict[str, Any]) -> ApiError:
    """The error that a problem document describes. A code that this version does not know becomes
    the class of its status."""
    code, status = str(problem.get("code", ApiError.code)), int(problem.get("status", 0))
    kind = _OF_STATUS.get(status, ServerError if status >= 500 else ApiError)
    known = _OF_CODE.get(code, kind)
    chosen = known if issubclass(known, kind) else kind
    detail = problem.get("detail") or problem.get("title") or code
    return chosen(detail, **{**problem, "code": code, "status": status})


def _with_codes(kind: type[ApiError]) -> dict[str, type[ApiError]]:
    """The classes below `kind` that define a code, by their codes."""
    found = {kind.code: kind} if "code" in vars(kind) else {}
    for below in kind.__subclasses__():
        found |= _with_codes(below)
    return found


_OF_CODE = _with_codes(ApiError)
_OF_STATUS = {kind.status: kind for kind in (Unauthorized, Forbidden, NotFound, Conflict)}
