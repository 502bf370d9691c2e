"""`submit`: submits a job from a file or standard input, with single values overridden."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import (
    LONG_RETRY_S,
    OPTIONS,
    SHORT_RETRY_S,
    Assignments,
    Options,
)
from holdfast.cli.exit_codes import ExitCode, of_state
from holdfast.cli.jobs import print_outcome
from holdfast.cli.printing import output
from holdfast.cli.submission.job_follower import JobFollower
from holdfast.cli.submission.rank_output import RankOutput
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import HoldfastError
from holdfast.formats import code_archive as code
from holdfast.formats import documents, requirements_file
from holdfast_service.views.jobs import JobView
from holdfast_service.views.meshes import MeshOrderView, ValidSpecView
from holdfast_service.wording import plural
from holdfast_workers.byte_sizes import size_of


class UnreadableSpec(HoldfastError, code="unreadable_spec", status=400):
    """The file of the spec cannot be read or is not a document."""


def submit(
    spec: Annotated[
        str | None,
        Parameter(
            name="SPEC",
            allow_leading_hyphen=True,
            help="A YAML or JSON file; - for standard input.",
        ),
    ] = None,
    /,
    *,
    file: Annotated[
        str | None,
        Parameter(name=("--file", "-f"), allow_leading_hyphen=True, help="SPEC as an option."),
    ] = None,
    set_: Assignments = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print the resolved spec, or its errors; create no job.")
    ] = False,
    follow: Annotated[
        bool, Parameter(negative="", help="Show the job until it has ended.")
    ] = False,
    idempotency_key: Annotated[
        str | None, Parameter(help="The same key never creates a second job.")
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Submit a job. Only its id is printed to stdout.

    With --follow the exit code is the job's: 0 succeeded, 1 failed, 7 cancelled. Ctrl-C then only
    ends the display: the job continues.
    """
    source = spec or file
    if source is None or (spec and file) or (source.startswith("-") and source != "-"):
        raise UnreadableSpec("name one file, or - for standard input: holdfast submit job.yaml")
    document = read_spec(source, set_ or [])
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        if dry_run:
            return print_resolved(client.validated(document), options)
        job = client.submit(document, idempotency_key=idempotency_key)
        if follow:
            return follow_job(client, job, options)
        if not output.result(options, job):
            output.console().print(job.id)
        print_suggestions(job)
    return ExitCode.OK


def print_resolved(resolved: ValidSpecView, options: Options) -> ExitCode:
    """Print the spec that a document resolves to; to stderr, what the job would take."""
    from holdfast_workers.spec.parallel import MESH_AXES  # late: only this needs the spec's models

    spec = resolved.spec
    if not output.result(options, spec):
        output.print_yaml(spec)
    ranks = math.prod(spec["parallel"][axis] for axis in MESH_AXES)
    per_node = spec["resources"]["workers_per_node"]
    places = f"{plural(ranks, 'rank')} on {plural(-(-ranks // per_node), 'node')}"
    meshes = _mesh_lines(resolved.meshes) or [Text(places)]
    output.progress(*meshes, resolved.node_needs.what)
    output.progress(Text.assemble(("ok", "green"), ": the spec is valid; no job was created"))
    return ExitCode.OK


def read_spec(source: str, assignments: list[str]) -> dict[str, object]:
    """The document of a file or of standard input, with `--set` applied."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        document = documents.read(text)
        for assignment in assignments:
            documents.set_path(document, assignment)
        folder = code.folder_of_spec(document)
        if folder is not None and source != "-":  # a path in a file is relative to the file
            document["code"] = str(Path(source).parent / folder)
        file = requirements_file.file_of_spec(document)
        if file is not None and source != "-":
            given = requirements_file.read(Path(source).parent / file)
            document = requirements_file.with_requirements(document, given)
    except (OSError, documents.DocumentError) as error:
        shown = "standard input" if source == "-" else source
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableSpec(f"{shown}: {message}") from error
    return document


def print_suggestions(job: JobView) -> None:
    """Print what can be done next with a job that runs on."""
    output.progress(*_suggestions(job))


def follow_job(
    client: Client,
    job: JobView,
    options: Options,
    *,
    ranks: RankOutput | None = None,
    interrupted: Callable[[JobView, JobFollower], None] | None = None,
) -> ExitCode:
    """Show a job until it has ended; returns its exit code.

    `ranks`: stdout gets the output of its ranks, and stderr its progress. Ctrl-C calls
    `interrupted`, which may follow the job further; by default it only ends the display.
    """
    output.progress(f"job {job.id}")
    follower = _follower(client, ranks)
    try:
        if options.plain:
            output.results(options, client.follow(job.id))
            job = client.get(job.id)
        else:
            job = follower.follow(job.id, ranks)
            print_outcome(
                job,
                client.verdict(job.id),
                None if ranks is None else output.stderr(),
                is_traceback_shown=ranks is not None and job.brings.is_program,
            )
    except KeyboardInterrupt:
        interrupted = interrupted or _tell_detached
        interrupted(job, follower)
        return ExitCode.INTERRUPTED
    return of_state(job.state)


def _follower(client: Client, ranks: RankOutput | None) -> JobFollower:
    console = output.console() if ranks is None else output.stderr()
    return JobFollower(client, console, is_of_program=ranks is not None)


def _mesh_lines(meshes: MeshOrderView | None) -> list[Text]:
    """The meshes of an elastic job in their order, and what was refused, with the reasons."""
    if meshes is None:
        return []
    lines = [Text("meshes, best first:", style="bold")]
    for found in meshes.legal:
        axes = " × ".join(f"{axis} {size}" for axis, size in found.mesh.items())
        ranks = f"{plural(found.world_size, 'rank')} on {plural(found.nodes, 'node')}"
        lines.append(Text(f"  {axes}: {ranks}, {_memory(found.memory_bytes)}; {found.why}"))
    for refused in meshes.refused:
        mesh = f" ({refused.mesh})" if refused.mesh else ""
        lines.append(Text(f"  not on {plural(refused.nodes, 'node')}{mesh}: {refused.why}"))
    if meshes.more:
        lines.append(Text(f"  and {meshes.more} more"))
    return lines


def _memory(nbytes: int | None) -> str:
    if nbytes is None:
        return "memory per rank not measured"
    return f"{size_of(nbytes)} per rank (modelled)"


def _suggestions(job: JobView) -> list[Text]:
    (job_id,) = output.ids([job.id])
    return [
        Text.assemble(("next", "bold"), f"  holdfast top {job_id}       shows its ranks live"),
        Text(f"      holdfast logs {job_id} -f   shows their output"),
        Text(f"      holdfast wait {job_id}      waits for its end; exits with its result"),
        Text(f"      holdfast cancel {job_id}    saves its last state and ends it"),
    ]


def _tell_detached(job: JobView, _follower: JobFollower) -> None:
    (job_id,) = output.ids([job.id])
    output.progress(
        Text.assemble("\n", ("detached", "bold"), f": job {job.name} continues"),
        Text(f"  holdfast wait {job_id}      waits for its end"),
        Text(f"  holdfast cancel {job_id}    saves its last state and ends it"),
    )
