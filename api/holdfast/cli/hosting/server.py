"""`serve`: runs the control plane in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import ValidationError

from holdfast.cli.common import NotUnderstood
from holdfast.cli.dashboard import dashboard_link
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.schemas import ServerFile
from holdfast_service import extras

if TYPE_CHECKING:
    from holdfast_service.settings import Settings


def serve(
    *,
    host: Annotated[str | None, Parameter(help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="Default 8642; 0: any free one.")] = None,
    auth: Annotated[
        Literal["local", "none"] | None,
        Parameter(help="Who may use it: who has the token in the data directory, or everybody."),
    ] = None,
    data_dir: Annotated[Path | None, Parameter(help="Default ~/.holdfast.")] = None,
    database_url: Annotated[
        str | None, Parameter(help="Default: SQLite in the data directory.")
    ] = None,
    ray_address: Annotated[
        str | None, Parameter(help="A Ray cluster; default: an embedded one.")
    ] = None,
    store_uri: Annotated[
        str | None,
        Parameter(help="Where checkpoints go by default: s3://bucket/prefix, or a shared path."),
    ] = None,
    store_endpoint: Annotated[
        str | None, Parameter(help="URL of the S3 service of that bucket; default: AWS.")
    ] = None,
    store_secret: Annotated[
        str | None, Parameter(help="Name of the secret of that bucket; default: AWS_*.")
    ] = None,
    ray_token_file: Annotated[
        Path | None, Parameter(help="That cluster's token, as `holdfast cluster up` made it.")
    ] = None,
    send_own_code: Annotated[
        bool, Parameter(negative="", help="Send this Holdfast to the nodes of that cluster.")
    ] = False,
    ranks_may_use_ray: Annotated[
        bool | None,
        Parameter(help="Allow jobs with Ray datasets; default: on an embedded cluster only."),
    ] = None,
    autoscale: Annotated[
        bool, Parameter(negative="", help="Ask that cluster's autoscaler for nodes that jobs lack.")
    ] = False,
    autoscale_nodes: Annotated[
        int | None, Parameter(help="Most nodes to ask for, with those that are there.")
    ] = None,
    local_nodes: Annotated[
        int | None, Parameter(help="Nodes of the embedded cluster; default 1 with GPUs, else 3.")
    ] = None,
    expose_without_authentication: Annotated[
        bool, Parameter(negative="", help="Allow a host that other machines can reach.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        Parameter(negative="", help="A proxy's name, if browsers use one; may be repeated."),
    ] = None,
    allow_fault_injection: Annotated[
        bool, Parameter(negative="", help="Allow `holdfast inject`.")
    ] = False,
    release_unknown_jobs: Annotated[
        bool, Parameter(negative="", help="After a restored backup: end jobs unknown to it.")
    ] = False,
    end_with_stdin: Annotated[
        bool, Parameter(negative="", help="Stop when stdin, a pipe, is closed: with its writer.")
    ] = False,
    json: Annotated[bool, Parameter(name="--json", negative="", help="JSON on stdout.")] = False,
) -> ExitCode:
    """Run the control plane until Ctrl-C or SIGTERM.

    Every option with a value can also be set as HOLDFAST_<OPTION> in the environment.
    """
    extras.require_server()
    settings = settings_of(
        host=host,
        port=port,
        auth=auth,
        data_dir=data_dir,
        database_url=database_url,
        ray_address=ray_address,
        store_uri=store_uri,
        store_endpoint=store_endpoint,
        store_secret=store_secret,
        ray_token_file=ray_token_file,
        send_own_code=send_own_code or None,
        ranks_may_use_ray=ranks_may_use_ray,
        autoscale=autoscale or None,
        autoscale_nodes=autoscale_nodes,
        local_nodes=local_nodes,
        allowed_host=allowed_host,
        allow_fault_injection=allow_fault_injection or None,
        release_unknown_jobs=release_unknown_jobs or None,
        end_with_stdin=end_with_stdin or None,
    )
    from holdfast.rest import embedded  # late, as all of the server

    embedded.begin(settings)
    from holdfast.rest import serve as server  # it loads the whole service
    from holdfast_workers import log_setup

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    log_setup.configure(timestamps=True, json_fields=None if sys.stderr.isatty() else {})

    def ready(started: ServerFile, code: str | None) -> None:
        if json:  # without the token: programs log what they read here
            output.print_json(started.model_copy(update={"token": None}))
            return
        output.stderr().print(
            f"Holdfast serves at {started.address} (data in {started.data_dir}); Ctrl-C stops it"
        )
        if code is not None:
            output.stderr().print(_dashboard(started.address, code), soft_wrap=True)

    try:
        asyncio.run(server.serve(settings, exposed=expose_without_authentication, on_ready=ready))
    except server.ServeError as error:
        output.stderr().print(f"error (serve): {error}")
        return ExitCode.SERVER
    has_ended = embedded.has_ended(settings)
    output.stderr().print(_stopped(settings.data_dir, cluster_has_ended=has_ended))
    return ExitCode.OK


def _stopped(data_dir: Path, *, cluster_has_ended: bool) -> str:
    """What has become of the jobs of a server that has ended."""
    if not cluster_has_ended:
        return "stopped; jobs train on, and the next server adopts them"
    return (
        "stopped, with its Ray cluster; jobs that have not ended go on with the next "
        f"`holdfast serve` on {data_dir}, from what they have saved outside of memory"
    )


def _dashboard(address: str, code: str) -> str:
    """A line with the link that opens the dashboard. It goes to the terminal of a person only:
    others may read the log of a service, where nobody uses the code up."""
    if not sys.stderr.isatty():
        return "Dashboard: `holdfast dashboard` prints a link for one browser"
    return f"Dashboard, for one browser: {dashboard_link(address, code)}"


def settings_of(**given: Any) -> Settings:
    """The server's settings, from these options (None: not given), the environment, and the folder
    that it names. Raises NotUnderstood."""
    # Late: part of the server.
    from holdfast_service.settings import FOLDER_VARIABLE, FileRefused, Settings

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not Path(folder).is_dir():
        raise NotUnderstood(
            f"{FOLDER_VARIABLE}: {folder} is not a folder: name one with a file per "
            "setting, such as HOLDFAST_DATABASE_URL"
        )
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise NotUnderstood(_invalid_options(error)) from error
    except FileRefused as error:
        raise NotUnderstood(f"{FOLDER_VARIABLE}: {error}") from error


def _invalid_options(error: ValidationError) -> str:
    """The invalid options, from the command line or the environment."""
    return "; ".join(
        f"{'.'.join(map(str, detail['loc'])) or 'options'}: {detail['msg']}"
        for detail in error.errors()
    )
