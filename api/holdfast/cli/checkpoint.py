"""`checkpoint ls`, `verify`, `pin`, `unpin`, `rm`, `export`: results on stdout, else stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from holdfast.cli import output
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.jobs import SHORT_RETRY_S, Address, JobId, Json
from holdfast.client import Client
from holdfast.errors import HoldfastError
from holdfast_service.views import CheckpointsView, CheckpointView

Step = Annotated[int | None, Parameter(help="Of which step; default: the newest.")]
OneStep = Annotated[int, Parameter(help="Of which step.")]


class NoCheckpoint(HoldfastError):
    """The job has none that one could take by default."""

    code = "checkpoint_not_found"
    status = 404


class DamagedCheckpoint(HoldfastError):
    """A verification found it to be bad."""

    code = "checkpoint_bad"


class CannotWrite(HoldfastError):
    """The file that was asked for cannot be written here."""

    code = "cannot_write"
    status = 400


def ls(job_id: JobId, /, *, json: Json = False, address: Address = None) -> ExitCode:
    """List what a job can go on from, by tier."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        found = client.checkpoints(job_id)
    if json:
        output.print_json(found)
        return ExitCode.OK
    protected = found.memory.protected_step
    if protected is not None:
        output.console().print(f"in memory: step {protected}, on every rank's partner too")
    output.console().print(_table(found))
    if found.storage_problem is not None:
        output.stderr().print(f"the storage could not be asked: {found.storage_problem}")
    return ExitCode.OK


def verify(
    job_id: JobId, /, *, step: Step = None, json: Json = False, address: Address = None
) -> ExitCode:
    """Read every byte of a checkpoint. One that is bad is quarantined, and the exit code 1."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        chosen = _step(client, job_id, step)
        with _progress("verifying") as progress:
            bar = progress.add_task(f"step {chosen}")
            for word in client.verify_checkpoint(job_id, chosen):
                progress.update(bar, completed=word.read_bytes, total=word.nbytes)
    if json:
        output.print_json(word)
    elif word.bad is None:
        output.console().print(f"step {chosen}: every byte is as it was saved")
    if word.bad is None:
        return ExitCode.OK
    output.print_error(DamagedCheckpoint(f"step {chosen} is quarantined: {word.bad}"))
    return ExitCode.JOB_FAILED


def pin(
    job_id: JobId, /, *, step: Step = None, json: Json = False, address: Address = None
) -> ExitCode:
    """Let nobody remove a checkpoint, whatever retention says; again is the same."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        pinned = client.pin_checkpoint(job_id, _step(client, job_id, step))
    output.print_json(pinned) if json else output.console().print(f"step {pinned.step} is pinned")
    return ExitCode.OK


def unpin(
    job_id: JobId, /, *, step: OneStep, json: Json = False, address: Address = None
) -> ExitCode:
    """Leave a checkpoint to retention again; again is the same."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        free = client.unpin_checkpoint(job_id, step)
    output.print_json(free) if json else output.console().print(f"step {free.step} is not pinned")
    return ExitCode.OK


def rm(job_id: JobId, /, *, step: OneStep, address: Address = None) -> ExitCode:
    """Remove a checkpoint, unless it is pinned, needed, or all that the job has (4)."""
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        client.remove_checkpoint(job_id, step)
    output.stderr().print(f"step {step} is removed")
    return ExitCode.OK


def export(
    job_id: JobId,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--output", "-o"), help="The file to write.")],
    step: Step = None,
    format: Annotated[Literal["safetensors"], Parameter(help="Of the file.")] = "safetensors",
    names: Annotated[
        Literal["own", "hf"], Parameter(help="hf: as Hugging Face's LlamaForCausalLM has them.")
    ] = "own",
    json: Json = False,
    address: Address = None,
) -> ExitCode:
    """Write a model, whole and verified, to one file."""
    del format  # there is one so far; scripts say which they mean
    with Client(address, retry_s=SHORT_RETRY_S) as client:
        chosen = _step(client, job_id, step)
        output.stderr().print(f"step {chosen} is verified first, which takes its time")
        with _progress("exporting") as progress:
            bar = progress.add_task(f"step {chosen}")
            try:
                nbytes = client.export_checkpoint(
                    job_id,
                    chosen,
                    out,
                    hugging_face=names == "hf",
                    on_bytes=lambda done, of: progress.update(bar, completed=done, total=of),
                )
            except OSError as error:
                raise CannotWrite(f"{out}: {error.strerror}") from error
    if json:
        output.print_json({"step": chosen, "file": str(out), "nbytes": nbytes})
    else:
        output.console().print(f"{out}: step {chosen}, {nbytes:,} bytes")
    return ExitCode.OK


def register(app: App) -> None:
    group = App(name="checkpoint", help="List, verify, pin, remove and export checkpoints.")
    for command in (ls, verify, pin, unpin, rm, export):
        group.command(command)
    app.command(group)


def _step(client: Client, job_id: str, given: int | None) -> int:
    """The step that was named, or the newest there is."""
    if given is not None:
        return given
    for one in client.checkpoints(job_id).remote:
        if one.deleted_at is None and one.bad is None:
            return one.step
    raise NoCheckpoint(f"job {job_id} has no remote checkpoint")


def _progress(what: str) -> Progress:
    """A bar on stderr, where that is a terminal."""
    console = output.stderr()
    return Progress(
        TextColumn(f"{what} {{task.description}}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _table(found: CheckpointsView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("STEP", "ATTEMPT", "BYTES", "AGE", "LOSS", "KEPT AS", "STATE"):
        table.add_column(heading, no_wrap=True)
    for one in found.remote:
        if one.deleted_at is None:
            table.add_row(
                str(one.step),
                str(one.attempt),
                f"{one.nbytes:,}",
                output.ago(one.saved_at),
                output.number(one.metrics.get("loss"), ".4f"),
                _kept_as(one),
                _state(one),
            )
    return table


def _kept_as(one: CheckpointView) -> str:
    words = ["pinned"] if one.pinned else []
    words += ["best"] if one.best else []
    words += [f"start of {job}" for job in one.needed_by or ()]
    return ", ".join(words) or "-"


def _state(one: CheckpointView) -> str:
    if one.bad is not None:
        return f"BAD: {one.bad}"
    return "saved" if one.verified_at is None else f"verified {output.ago(one.verified_at)}"
