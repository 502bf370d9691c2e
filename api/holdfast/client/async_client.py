"""`holdfast.AsyncClient`: `holdfast.Client` for an event loop."""

from __future__ import annotations

from holdfast.client.async_jobs import AsyncJobs
from holdfast.client.async_request_methods import AsyncRequestMethods


class AsyncClient(AsyncRequestMethods):
    """A connection to one server; close it, or use it in an `async with` statement. One loop each.

    The arguments are those of `Client`.
    """

    @property
    def jobs(self) -> AsyncJobs:
        """Jobs as objects: `client.jobs.submit(...)`, `.get(...)`, `.list(...)`."""
        return AsyncJobs(self)
