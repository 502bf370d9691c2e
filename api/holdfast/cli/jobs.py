"""`submit`, `ls`, `describe`, `wait`, `cancel`, `pause`, `resume`, `logs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.table import Table

from holdfast import documents
from holdfast.cli import describe as description
from holdfast.cli import output
from holdfast.cli.exit_codes import ExitCode, of_state
from holdfast.cli.progress import ProgressShow
from holdfast.client import Client
from holdfast.errors import HoldfastError
from holdfast_service.lifecycle import State
from holdfast_service.views import JobView, LogLineView

Address = Annotated[
    str | None,
    Parameter(
        help="The server's URL; else HOLDFAST_ADDRESS, else the one that serves the data "
        "directory, else http://127.0.0.1:8642."
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="JSON on stdout.")]
JobId = Annotated[str, Parameter(help="Id of the job.")]


SHORT_RETRY_S = 2.0  # somebody looks at the terminal
LONG_RETRY_S = 60.0  # time for a server to be started again under a command that waits


class UnreadableSpec(HoldfastError):
    """The spec's file cannot be read or is no document."""

    code = "unreadable_spec"
    status = 400


def submit(
    spec: Annotated[str, Parameter(help="A YAML or JSON file; - for standard input.")],
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="path.to.key=value, over the file's own."),
    ] = None,
    follow: Annotated[bool, Parameter(negative="", help="Show it until it has ended.")] = False,
    idempotency_key: Annotated[str | None, Parameter(help="Makes a repetition harmless.")] = None,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Submit a job.

    With --follow the exit code is the job's: 0 succeeded, 1 failed, 7 cancelled.
    """
    document = read_spec(spec, set_ or [])
    with Client(address, retry_s=LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        job = client.submit(document, idempotency_key=idempotency_key)
        if not follow:
            output.print_json(job) if json else output.console().print(job.id)
            return ExitCode.OK
        if json:
            for event in client.follow(job.id):
                output.print_json(event)
            job = client.get(job.id)
        else:
            output.stderr().print(f"job {job.id}")
            job = ProgressShow(client, output.console()).follow(job.id)
            _print_outcome(job)
        return of_state(job.state)


def ls(
    *,
    state: Annotated[
        list[State] | None, Parameter(negative="", help="Only jobs in this state.")
    ] = None,
    name: Annotated[str | None, Parameter(help="Only jobs of this name.")] = None,
    limit: Annotated[int, Parameter(help="The newest so many.")] = 50,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """List jobs, newest first."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        found = client.list(state=[one.value for one in state or []], name=name)
        jobs = [job for job, _ in zip(found, range(limit), strict=False)]
    if json:
        for job in jobs:
            output.print_json(job)
        return ExitCode.OK
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("ID", "NAME", "STATE", "STEP", "LOSS", "ATTEMPT", "INCIDENTS", "CREATED"):
        table.add_column(heading, no_wrap=True)
    for job in jobs:
        progress = job.progress
        table.add_row(
            job.id,
            job.name,
            output.state_text(job.state),
            f"{progress.step}/{progress.steps}",
            output.number(progress.loss, ".4f"),
            str(progress.attempt),
            str(progress.incidents),
            output.ago(job.created_at),
        )
    output.console().print(table)
    return ExitCode.OK


def describe(job_id: JobId, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """Show a job in full: attempts, incidents, checkpoints, the traceback of a failure."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        job = client.get(job_id)
        attempts = client.attempts(job_id)
        incidents = client.incidents(job_id)
        checkpoints = client.checkpoints(job_id)
        goodput = client.goodput(job_id)
    if not json:
        description.show(output.console(), job, attempts, incidents, checkpoints, goodput)
        return ExitCode.OK
    parts = {"attempts": attempts, "incidents": incidents}
    lists = {name: [one.model_dump(mode="json") for one in part] for name, part in parts.items()}
    rest = {"job": job, "checkpoints": checkpoints, "goodput": goodput}
    output.print_json({name: one.model_dump(mode="json") for name, one in rest.items()} | lists)
    return ExitCode.OK


def wait(
    job_id: JobId,
    /,
    *,
    timeout: Annotated[float | None, Parameter(help="Seconds; then exit code 6.")] = None,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Wait until a job has ended. The exit code is the job's: 0, 1 failed, 7 cancelled."""
    with Client(address, retry_s=LONG_RETRY_S) as client:
        job = client.wait(job_id, timeout)
    if json:
        output.print_json(job)
    else:
        _print_outcome(job)
    return of_state(job.state)


def cancel(
    job_id: JobId,
    /,
    *,
    now: Annotated[
        bool, Parameter(negative="", help="At once, without waiting for a last checkpoint.")
    ] = False,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Cancel a job; its last state is saved before. A second cancel ends it at once, as --now does.

    A job that ended otherwise is a conflict (4).
    """
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        again = client.get(job_id).state is State.CANCELLING
        job = client.cancel(job_id, now=now or again)
    return _print_state(job, json)


def pause(job_id: JobId, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """Pause a job: it saves its state and gives its nodes back, until `resume`."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        return _print_state(client.pause(job_id), json)


def resume(job_id: JobId, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """Let a paused job go on from where it was saved, with the same bits."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        return _print_state(client.resume(job_id), json)


def logs(
    job_id: JobId,
    /,
    *,
    follow: Annotated[
        bool, Parameter(name=("--follow", "-f"), negative="", help="Until the job has ended.")
    ] = False,
    rank: Annotated[int | None, Parameter(help="Only this rank's.")] = None,
    attempt: Annotated[int | None, Parameter(help="Only this attempt's.")] = None,
    tail: Annotated[int | None, Parameter(help="Only the last lines.")] = None,
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Print what the ranks of a job wrote."""
    with Client(address, retry_s=LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        if follow:
            for line in client.follow_logs(job_id, rank=rank, attempt=attempt, tail=tail):
                _print_line(line, json)
            return ExitCode.OK
        page = client.logs(job_id, rank=rank, attempt=attempt, tail=tail)
        while True:
            for line in page.lines:
                _print_line(line, json)
            if tail is not None or not page.more:
                return ExitCode.OK
            page = client.logs(job_id, rank=rank, attempt=attempt, after=page.last_line)


def read_spec(source: str, assignments: list[str]) -> dict[str, object]:
    """The document of a file or of standard input, with `--set` applied."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        document = documents.read(text)
        for assignment in assignments:
            documents.set_path(document, assignment)
    except (OSError, documents.DocumentError) as error:
        shown = "standard input" if source == "-" else source
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableSpec(f"{shown}: {message}") from error
    return document


def register(app: App) -> None:
    for command in (submit, ls, describe, logs, wait, cancel, pause, resume):
        app.command(command)


def _print_state(job: JobView, json: bool) -> ExitCode:
    output.print_json(job) if json else output.console().print(output.state_text(job.state))
    return ExitCode.OK


def _print_outcome(job: JobView) -> None:
    console = output.console()
    console.print(output.state_text(job.state), f"at step {job.progress.step}")
    if job.outcome is not None and job.state is not State.SUCCEEDED:
        output.stderr().print(f"{job.outcome.code}: {job.outcome.message}")
        if job.outcome.traceback:
            output.stderr().print(job.outcome.traceback.rstrip(), markup=False)


def _print_line(line: LogLineView, json: bool) -> None:
    if json:
        output.print_json(line)
        return
    who = "agent" if line.rank is None else f"rank {line.rank}"
    sys.stdout.write(f"{output.clock(line.at)} {line.attempt}/{who} {line.text}\n")
    sys.stdout.flush()
