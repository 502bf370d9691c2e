"""`checkpoint ls`, `verify`, `pin`, `unpin`, `rm`, `export`: results on stdout, else stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.columns import Column
from holdfast.cli.common import OPTIONS, SERVER, JobWord, Options, Server
from holdfast.cli.exit_codes import ExitCode
from holdfast.client.client import Client
from holdfast.errors import HoldfastError
from holdfast_service.job_model.init_from import parse_job_reference
from holdfast_service.views.jobs import CheckpointView

if TYPE_CHECKING:
    from rich.progress import Progress

CheckpointWord = Annotated[
    str, Parameter(name="JOB", help="A job, or JOB/STEP: its name, its id, or the beginning of it.")
]
Step = Annotated[int | None, Parameter(help="Of which step; default: the newest.")]
OneStep = Annotated[int | None, Parameter(help="Of which step; JOB/STEP says it, too.")]

COLUMNS = (
    Column("STEP", right=True),
    Column("ATTEMPT", right=True, drop=1),
    Column("BYTES", right=True),
    Column("AGE", right=True),
    Column("LOSS", right=True, drop=2),
    Column("KEPT AS", least=8),
    Column("STATE", least=8),
)


class NoCheckpoint(HoldfastError):
    """The job has none that one could take by default."""

    code = "checkpoint_not_found"
    status = 404


class StepUnclear(HoldfastError):
    """Which checkpoint is meant was not said, or not in a way that has one meaning."""

    code = "step_unclear"
    status = 400


class DamagedCheckpoint(HoldfastError):
    """A verification found it to be bad."""

    code = "checkpoint_bad"


class CannotWrite(HoldfastError):
    """The file that was asked for cannot be written here."""

    code = "cannot_write"
    status = 400


def ls(job_word: JobWord, /, *, options: Options = OPTIONS) -> ExitCode:
    """List what a job can go on from, by tier."""
    with options.connect() as client:
        found = client.checkpoints(client.find(job_word))
    if output.results(options, [found]):
        return ExitCode.OK
    protected = found.memory.protected_step
    if protected is not None:
        output.console().print(f"in memory: step {protected}, on every rank's partner too")
    rows = [_row(item) for item in found.remote if item.deleted_at is None]
    if rows:
        output.table(COLUMNS, rows, whole=options.wide)
    else:
        output.talk("no remote checkpoint")
    if found.storage_problem is not None:
        output.talk(f"the storage could not be asked: {found.storage_problem}")
    return ExitCode.OK


def verify(word: CheckpointWord, /, *, step: Step = None, options: Options = OPTIONS) -> ExitCode:
    """Read every byte of a checkpoint. One that is bad is quarantined, and the exit code 1."""
    with options.connect() as client:
        job_id, chosen = _one(client, word, step)
        with _progress("verifying") as progress:
            bar = progress.add_task(f"step {chosen}")
            for told in client.verify_checkpoint(job_id, chosen):
                progress.update(bar, completed=told.read_bytes, total=told.nbytes)
    if not output.results(options, [told]) and told.bad is None:
        output.console().print(f"step {chosen}: every byte is as it was saved")
    if told.bad is None:
        return ExitCode.OK
    output.print_error(DamagedCheckpoint(f"step {chosen} is quarantined: {told.bad}"))
    return ExitCode.JOB_FAILED


def pin(word: CheckpointWord, /, *, step: Step = None, options: Options = OPTIONS) -> ExitCode:
    """Let nobody remove a checkpoint, whatever retention says; again is the same."""
    with options.connect() as client:
        pinned = client.pin_checkpoint(*_one(client, word, step))
    if not output.results(options, [pinned]):
        output.console().print(f"step {pinned.step} is pinned")
    return ExitCode.OK


def unpin(word: CheckpointWord, /, *, step: OneStep = None, options: Options = OPTIONS) -> ExitCode:
    """Leave a checkpoint to retention again; again is the same."""
    with options.connect() as client:
        free = client.unpin_checkpoint(*_said(client, word, step))
    if not output.results(options, [free]):
        output.console().print(f"step {free.step} is not pinned")
    return ExitCode.OK


def rm(word: CheckpointWord, /, *, step: OneStep = None, server: Server = SERVER) -> ExitCode:
    """Remove a checkpoint, unless it is pinned, needed, or all that the job has (4)."""
    with server.connect() as client:
        job_id, chosen = _said(client, word, step)
        client.remove_checkpoint(job_id, chosen)
    output.talk(f"step {chosen} is removed")
    return ExitCode.OK


def export(
    word: CheckpointWord,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--output", "-o"), help="The file to write.")],
    step: Step = None,
    format: Annotated[Literal["safetensors"], Parameter(help="Of the file.")] = "safetensors",
    names: Annotated[
        Literal["own", "hf"], Parameter(help="hf: as Hugging Face's LlamaForCausalLM has them.")
    ] = "own",
    json: Annotated[bool, Parameter(negative="", help="JSON on stdout.")] = False,
    server: Server = SERVER,
) -> ExitCode:
    """Write a model, whole and verified, to one file."""
    del format  # there is one so far; scripts say which they mean
    with server.connect() as client:
        job_id, chosen = _one(client, word, step)
        output.talk(f"step {chosen} is verified first, which takes its time")
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


group = App(name="checkpoint")
for command in (ls, verify, pin, unpin, rm, export):
    group.command(command)


def _parts(word: str, step: int | None) -> tuple[str, int | None]:
    """The job, and the step that JOB/STEP or `--step` says."""
    try:
        named = parse_job_reference(word)
    except ValueError as error:
        raise StepUnclear(f"{error}, as {word.partition('/')[0]}/200 is") from error
    if None not in (named.step, step) and named.step != step:
        raise StepUnclear(f"{word!r} says another step than --step {step}")
    return named.job, step if named.step is None else named.step


def _one(client: Client, word: str, step: int | None) -> tuple[str, int]:
    """The job's id, and the step that was named, or the newest there is."""
    job_word, said = _parts(word, step)
    job_id = client.find(job_word)
    if said is not None:
        return job_id, said
    for item in client.checkpoints(job_id).remote:
        if item.deleted_at is None and item.bad is None:
            return job_id, item.step
    raise NoCheckpoint(f"job {job_id} has no remote checkpoint")


def _said(client: Client, word: str, step: int | None) -> tuple[str, int]:
    """The job's id, and the step; none is taken by default."""
    job_word, said = _parts(word, step)
    if said is None:
        raise StepUnclear(f"which checkpoint? {word}/STEP says it; `checkpoint ls {word}` has them")
    return client.find(job_word), said


def _progress(what: str) -> Progress:
    """A bar on stderr, where that is a terminal."""
    from rich.progress import (  # late: slow to load, and two commands need it
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

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


def _row(one: CheckpointView) -> list[str | Text]:
    return [
        str(one.step),
        str(one.attempt),
        f"{one.nbytes:,}",
        output.age(one.saved_at),
        output.number(one.metrics.get("loss"), ".4f"),
        _kept_as(one),
        _state(one),
    ]


def _kept_as(one: CheckpointView) -> str:
    words = ["pinned"] if one.pinned else []
    words += ["best"] if one.best else []
    words += [f"start of {job}" for job in one.needed_by or ()]
    return ", ".join(words) or "-"


def _state(one: CheckpointView) -> Text:
    if one.bad is not None:
        return Text(f"BAD: {one.bad}", style="bold red")
    return Text("saved" if one.verified_at is None else f"verified {output.ago(one.verified_at)}")
