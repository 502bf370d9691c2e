"""`holdfast.Client`: the REST API as Python calls and values.

The methods of the client take ids and return plain values, one method per request.
`client.jobs` returns jobs as objects, which is the easiest way to write programs.
"""

from __future__ import annotations

from holdfast.client.jobs import Jobs
from holdfast.client.request_methods import RequestMethods


class Client(RequestMethods):
    """A connection to one server; close it, or use it in a `with` statement. One thread each.

    `context` names a server of the user's configuration (`holdfast login`), `token` is sent as a
    bearer token. `holdfast.client.address` describes how the server is found by default.
    """

    @property
    def jobs(self) -> Jobs:
        """Jobs as objects: `client.jobs.submit(...)`, `.get(...)`, `.list(...)`."""
        return Jobs(self)
