"""The exit codes of `holdfast`. Scripts depend on them: a number never changes its meaning."""

from __future__ import annotations

from enum import IntEnum

from holdfast.errors import (
    Conflict,
    HoldfastError,
    InvalidSpec,
    NotFound,
    ServerUnreachable,
    WaitTimeout,
)
from holdfast_service.job_model.lifecycle import State


class ExitCode(IntEnum):
    OK = 0
    JOB_FAILED = 1  # the job ended FAILED; for the demo and `verify` also: the runs differ
    USAGE = 2  # the command line or the spec is wrong; for `verify` also: no result
    NOT_FOUND = 3
    CONFLICT = 4  # not possible in the present state
    UNREACHABLE = 5  # no server answers
    TIMEOUT = 6  # `--timeout` passed before the job ended
    CANCELLED = 7  # the job ended CANCELLED
    SERVER = 8  # the server failed, could not start, or is not ready
    UNFORESEEN = 9  # a bug of this program: see stderr
    INTERRUPTED = 130  # Ctrl-C


def of_error(error: HoldfastError) -> ExitCode:
    """The exit code of a command that failed with `error`."""
    match error:
        case InvalidSpec():
            return ExitCode.USAGE
        case NotFound():
            return ExitCode.NOT_FOUND
        case Conflict():
            return ExitCode.CONFLICT
        case ServerUnreachable():
            return ExitCode.UNREACHABLE
        case WaitTimeout():
            return ExitCode.TIMEOUT
        case _:
            return ExitCode.USAGE if 400 <= error.status < 500 else ExitCode.SERVER


def of_state(state: State) -> ExitCode:
    """The exit code of a command that waits for the end of a job."""
    return {State.FAILED: ExitCode.JOB_FAILED, State.CANCELLED: ExitCode.CANCELLED}.get(
        state, ExitCode.OK
    )
