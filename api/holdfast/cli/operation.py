"""The commands `operation ls` and `cancel`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from holdfast.cli.common import OPTIONS, SERVER, Options, ServerOptions, complete_job
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast_service.views.operations import OperationView

COLUMNS = (
    Column("ID"),
    Column("KIND"),
    Column("JOB", least=8),
    Column("STEP", right=True),
    Column("STATE"),
    Column("DONE", right=True),
    Column("AGE", right=True),
    Column("RESULT", least=8),
)


def ls(
    job_word: Annotated[
        str | None,
        Parameter(name="JOB", help="Only of this job, by its name or id.", completer=complete_job),
    ] = None,
    /,
    *,
    options: Options = OPTIONS,
) -> ExitCode:
    """List verifications and exports of checkpoints; ended ones are kept for some hours."""
    with options.connect() as client:
        found = client.operations(None if job_word is None else client.find(job_word))
    if output.results(options, found):
        return ExitCode.OK
    if not found:
        output.progress("no operation")
        return ExitCode.OK
    output.table(COLUMNS, [_row(operation) for operation in found], whole=options.wide)
    return ExitCode.OK


def cancel(
    operation_id: Annotated[str, Parameter(name="ID", help="Id of the operation.")],
    /,
    *,
    server: ServerOptions = SERVER,
) -> ExitCode:
    """Cancel an operation. Can be repeated."""
    with server.connect() as client:
        client.cancel_operation(operation_id)
    output.progress(f"operation {operation_id} is cancelled")
    return ExitCode.OK


group = App(name="operation")
for command in (ls, cancel):
    group.command(command)


def _row(operation: OperationView) -> list[str]:
    total = operation.total_bytes
    done = f"{operation.done_bytes / total:.0%}" if total else "-"
    return [
        operation.id,
        operation.kind,
        operation.job_id,
        str(operation.step),
        operation.state,
        done,
        output.age(operation.created_at),
        _result(operation),
    ]


def _result(operation: OperationView) -> str:
    if operation.error is not None:
        return str(operation.error.get("detail"))
    if operation.bad is not None:
        return f"BAD: {operation.bad}"
    content = operation.content
    return "-" if content is None else f"{content.name}, {content.nbytes:,} bytes"
