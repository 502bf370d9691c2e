"""The commands `checkpoint ls`, `verify`, `pin`, `unpin`, `rm` and `export`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.common import OPTIONS, SERVER, JobWord, Options, ServerOptions, complete_job
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast.client.model_folder import folder_at
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import HoldfastError
from holdfast_service.job_model.job_reference import parse_job_reference
from holdfast_service.views.checkpoints import CheckpointView
from holdfast_service.views.operations import OperationView

if TYPE_CHECKING:
    from rich.progress import Progress

CheckpointWord = Annotated[
    str,
    Parameter(
        name="JOB",
        help="A job or JOB/STEP; a job by its name, its id, or the start or end of the id.",
        completer=complete_job,
    ),
]
Step = Annotated[int | None, Parameter(help="Step of the checkpoint; default: the newest.")]
RequiredStep = Annotated[int | None, Parameter(help="Step of the checkpoint; or JOB/STEP.")]

BEFORE_METRICS = (
    Column("STEP", right=True),
    Column("ATTEMPT", right=True, drop=1),
    Column("BYTES", right=True),
    Column("AGE", right=True),
)
AFTER_METRICS = (Column("KEPT AS", least=8), Column("STATE", least=8))
METRICS = ("loss", "eval_loss")
"""Shown, the second one if a checkpoint has it."""


class NoCheckpoint(HoldfastError, code="checkpoint_not_found", status=404):
    """The job has no checkpoint to choose by default."""


class StepUnclear(HoldfastError, code="step_unclear", status=400):
    """The step of the checkpoint is missing or ambiguous."""


class VerificationFailed(HoldfastError, code="checkpoint_bad"):
    """A verification found that the checkpoint is bad."""


class CannotWrite(HoldfastError, code="cannot_write", status=400):
    """The output file cannot be written."""


def ls(job_word: JobWord, /, *, options: Options = OPTIONS) -> ExitCode:
    """List the checkpoints that a job can continue from, by tier."""
    with options.connect() as client:
        found = client.checkpoints(client.find(job_word))
    if output.result(options, found):
        return ExitCode.OK
    memory = found.memory
    step = "" if memory.protected_step is None else f"step {memory.protected_step}, "
    output.console().print(f"in memory: {step}{memory.where}")
    kept = [checkpoint for checkpoint in found.items if checkpoint.deleted_at is None]
    if kept:
        evaluated = any(METRICS[1] in checkpoint.metrics for checkpoint in kept)
        metrics = METRICS if evaluated else METRICS[:1]
        heads = (Column(name.upper().replace("_", " "), right=True, drop=2) for name in metrics)
        columns = (*BEFORE_METRICS, *heads, *AFTER_METRICS)
        rows = [_row(checkpoint, metrics) for checkpoint in kept]
        output.table(columns, rows, whole=options.wide)
    else:
        output.progress("no remote checkpoint")
    if found.storage_problem is not None:
        output.progress(f"the storage did not answer: {found.storage_problem}")
    return ExitCode.OK


def verify(word: CheckpointWord, /, *, step: Step = None, options: Options = OPTIONS) -> ExitCode:
    """Read every byte of a checkpoint. A bad one is quarantined, and the exit code is 1.

    The server goes on without this command.
    """
    with options.connect() as client:
        job_id, chosen = _find_checkpoint(client, word, step)
        operation = _shown("verifying", client.verify_checkpoint(job_id, chosen))
    if not output.result(options, operation) and operation.bad is None:
        output.console().print(f"step {chosen}: every byte is as it was saved")
    if operation.bad is None:
        return ExitCode.OK
    output.print_error(VerificationFailed(f"step {chosen} is quarantined: {operation.bad}"))
    return ExitCode.JOB_FAILED


def pin(word: CheckpointWord, /, *, step: Step = None, options: Options = OPTIONS) -> ExitCode:
    """Protect a checkpoint from removal and from retention. Can be repeated."""
    with options.connect() as client:
        pinned = client.pin_checkpoint(*_find_checkpoint(client, word, step))
    if not output.result(options, pinned):
        output.console().print(f"step {pinned.step} is pinned")
    return ExitCode.OK


def unpin(
    word: CheckpointWord, /, *, step: RequiredStep = None, options: Options = OPTIONS
) -> ExitCode:
    """Give a checkpoint back to retention. Can be repeated."""
    with options.connect() as client:
        unpinned = client.unpin_checkpoint(*_find_named_checkpoint(client, word, step))
    if not output.result(options, unpinned):
        output.console().print(f"step {unpinned.step} is not pinned")
    return ExitCode.OK


def rm(
    word: CheckpointWord, /, *, step: RequiredStep = None, server: ServerOptions = SERVER
) -> ExitCode:
    """Remove a checkpoint. A pinned, needed or last checkpoint is a conflict (exit code 4)."""
    with server.connect() as client:
        job_id, chosen = _find_named_checkpoint(client, word, step)
        client.remove_checkpoint(job_id, chosen)
    output.progress(f"step {chosen} is removed")
    return ExitCode.OK


def export(
    word: CheckpointWord,
    /,
    *,
    out: Annotated[
        Path, Parameter(name=("--output", "-o"), help="The file, or for hf the folder, to write.")
    ],
    step: Step = None,
    format: Annotated[
        Literal["safetensors"], Parameter(help="Format of the file.")
    ] = "safetensors",
    names: Annotated[
        Literal["own", "hf"],
        Parameter(help="hf: a folder that Hugging Face's transformers loads, with its names."),
    ] = "own",
    average: Annotated[
        bool, Parameter(negative="", help="The moving averages of the weights (train.ema).")
    ] = False,
    json: Annotated[bool, Parameter(negative="", help="JSON on stdout.")] = False,
    server: ServerOptions = SERVER,
) -> ExitCode:
    """Verify a checkpoint and write the whole model to one file, or to a folder for Hugging Face.

    The server goes on without this command, and keeps its file for some hours: repeated, the
    command fetches that.
    """
    del format  # only one so far; scripts can already name it
    is_folder = names == "hf"
    if is_folder:
        with _writing(out):  # what would fail in the end fails before the server begins
            folder_at(out)
    with server.connect() as client:
        job_id, chosen = _find_checkpoint(client, word, step)
        making = client.prepare_export(job_id, chosen, hugging_face=is_folder, average=average)
        operation = _shown("verifying", making)
        download = client.download_folder if is_folder else client.download
        with _progress("exporting") as progress, _writing(out):
            bar = progress.add_task(f"step {chosen}")
            nbytes = download(
                operation.id,
                out,
                lambda done, of: progress.update(bar, completed=done, total=of),
            )
    note = operation.content.note if operation.content else None
    if json:
        output.print_json({"step": chosen, "file": str(out), "nbytes": nbytes, "note": note})
    else:
        output.console().print(f"{out}: step {chosen}, {nbytes:,} bytes")
    if note is not None:
        output.progress(f"note: {note}")
    return ExitCode.OK


group = App(name="checkpoint")
for command in (ls, verify, pin, unpin, rm, export):
    group.command(command)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raises CannotWrite."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"{out}: {error.strerror}") from error


def _parts(word: str, step: int | None) -> tuple[str, int | None]:
    """The job, and the step from JOB/STEP or `--step`."""
    try:
        named = parse_job_reference(word)
    except ValueError as error:
        raise StepUnclear(f"{error}, such as {word.partition('/')[0]}/200") from error
    if None not in (named.step, step) and named.step != step:
        raise StepUnclear(f"{word!r} and --step {step} are different steps")
    return named.job, step if named.step is None else named.step


def _find_checkpoint(client: Client, word: str, step: int | None) -> tuple[str, int]:
    """The job's id, and the given step or that of the newest checkpoint."""
    job_word, named = _parts(word, step)
    job_id = client.find(job_word)
    if named is not None:
        return job_id, named
    for checkpoint in client.checkpoints(job_id).items:
        if checkpoint.deleted_at is None and checkpoint.bad is None:
            return job_id, checkpoint.step
    raise NoCheckpoint(f"job {job_id} has no remote checkpoint")


def _find_named_checkpoint(client: Client, word: str, step: int | None) -> tuple[str, int]:
    """The job's id and the given step; there is no default step."""
    job_word, named = _parts(word, step)
    if named is None:
        raise StepUnclear(f"name the checkpoint: {word}/STEP; `checkpoint ls {word}` lists them")
    return client.find(job_word), named


def _shown(activity: str, advancing: Iterator[OperationView]) -> OperationView:
    """The operation at its end; its progress is shown meanwhile."""
    operation = None
    with _progress(activity) as progress:
        bar = progress.add_task("", total=None)
        try:
            for operation in advancing:
                progress.update(
                    bar,
                    description=f"step {operation.step}",
                    completed=operation.done_bytes,
                    total=operation.total_bytes,
                )
        except KeyboardInterrupt:
            if operation is not None:
                end = f"`holdfast operation cancel {operation.id}` ends it"
                output.progress(f"the server goes on; {end}")
            raise
    assert operation is not None
    return operation


def _progress(activity: str) -> Progress:
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import (  # late: slow to load, and only two commands need it
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    console = output.stderr()
    return Progress(
        TextColumn(f"{activity} {{task.description}}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _row(checkpoint: CheckpointView, metrics: Sequence[str]) -> list[str | Text]:
    return [
        str(checkpoint.step),
        str(checkpoint.attempt),
        f"{checkpoint.nbytes:,}",
        output.age(checkpoint.saved_at),
        *(output.number(checkpoint.metrics.get(name), ".4f") for name in metrics),
        _kept_as(checkpoint),
        _state(checkpoint),
    ]


def _kept_as(checkpoint: CheckpointView) -> str:
    labels = ["pinned"] if checkpoint.pinned else []
    labels += ["best"] if checkpoint.best else []
    labels += [f"start of {job}" for job in checkpoint.needed_by or ()]
    return ", ".join(labels) or "-"


def _state(checkpoint: CheckpointView) -> Text:
    if checkpoint.bad is not None:
        return Text(f"BAD: {checkpoint.bad}", style="bold red")
    return Text(
        "saved"
        if checkpoint.verified_at is None
        else f"verified {output.ago(checkpoint.verified_at)}"
    )
