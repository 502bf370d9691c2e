"""The errors of the client: one tree of exceptions, each with a stable `code`.

Every `code` of the server has its own type, a subclass of the type of its HTTP status: `JobEnded`
is a `Conflict`. A code that this client does not know becomes the type of its status.
`holdfast_service.errors` defines them, because the server raises them too.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_service.errors import *  # noqa: F403  (every error of the API)
from holdfast_service.errors import HoldfastError, ServerError, StorageUnavailable


class ServerUnreachable(HoldfastError, code="server_unreachable"):
    """No server answered, after retries."""


class WaitTimeout(HoldfastError, code="wait_timeout"):
    """The job had not ended at the end of the allowed waiting time."""


class JobFailed(HoldfastError):
    """A job ended without success; `code` is that of its outcome."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class NotFetched(HoldfastError, code="not_fetched"):
    """A job that comes from a list has no details until it is fetched."""


class AmbiguousName(HoldfastError, code="ambiguous_name", status=400):
    """Several jobs match the given name or start or end of an id; `candidates` are their ids."""

    def __init__(self, message: str, candidates: Sequence[str]) -> None:
        super().__init__(message)
        self.candidates = tuple(candidates)


class ForeignServer(HoldfastError, code="foreign_server", status=400):
    """The process at the server's address is another user's: it gets no token."""


class InvalidConfig(HoldfastError, code="invalid_config", status=400):
    """The user's configuration file is unusable or lacks a context, or an address is invalid.

    The message contains a remedy.
    """


def unfinished(why: str) -> ServerError:
    """The error of a stream that ended without its result."""
    return StorageUnavailable(why)
