"""The errors of the client: one tree of exceptions, each with a stable `code`.

Every `code` of the server has its own type, a subclass of the type of its HTTP status: `JobEnded`
is a `Conflict`. A code that this client does not know becomes the type of its status.
`holdfast_service.errors` defines them, because the server raises them too.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.errors import *  # noqa: F403  (every error of the API)
from holdfast_service.errors import HoldfastError, ServerError, StorageUnavailable


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


class NotFetched(HoldfastError):
    """A job that comes from a list has no details until it is fetched."""

    code = "not_fetched"


class AmbiguousName(HoldfastError):
    """Several jobs match the given name or start of an id; `candidates` are their ids."""

    code = "ambiguous_name"
    status = 400

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class ForeignServer(HoldfastError):
    """The process at the server's address is another user's: it gets no token."""

    code = "foreign_server"
    status = 400


class InvalidConfig(HoldfastError):
    """The user's configuration file is unusable or lacks a context, or an address is invalid.

    The message contains a remedy.
    """

    code = "invalid_config"
    status = 400


def unfinished(why: str) -> ServerError:
    """The error of a stream that ended without its result."""
    return StorageUnavailable(why)
