# Generated from asynchronous/client.py by api/generate_client.py: do not edit.
"""The REST API as Python calls and values: `holdfast.Client` and `holdfast.AsyncClient`.

The methods of a client take ids and return plain values, one method per request.
`client.jobs` returns jobs as objects, which is the easiest way to write programs.
"""

from __future__ import annotations

from holdfast.client.synchronous.jobs import Jobs
from holdfast.client.synchronous.request_methods import RequestMethods


class Client(RequestMethods):
    """A connection to one server; close it, or use it as a context manager. For one event loop, or
    one thread.

    `context` names a server of the user's configuration (`holdfast login`), `token` is sent as a
    bearer token. `holdfast.client.address` describes how the server is found by default.
    """

    @property
    def jobs(self) -> Jobs:
        """Jobs as objects: `client.jobs.submit(...)`, `.get(...)`, `.list(...)`."""
        return Jobs(self)
