"""`dashboard`: prints a link that opens the dashboard in a browser."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from holdfast.cli.common import OPTIONS, Options, complete_job
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output


def dashboard(
    job: Annotated[
        str | None,
        Parameter(
            name="JOB",
            help="Open the page of this job; default: the list.",
            completer=complete_job,
        ),
    ] = None,
    /,
    *,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print a link that opens the dashboard in one browser, within 15 minutes."""
    with options.connect() as client:
        path = "/" if job is None else f"/jobs/{client.find(job)}"
        link = dashboard_link(client.address, client.session_code().code, path)
    if not output.result(options, {"link": link}):
        output.console().print(link, soft_wrap=True)
    return ExitCode.OK


def dashboard_link(address: str, code: str | None, path: str = "/") -> str:
    """The code is in the fragment, which browsers do not send, and no log has."""
    return f"{address}{path}" if code is None else f"{address}{path}#code={quote(code)}"
