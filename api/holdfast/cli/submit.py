"""`submit`: a job from a file, from standard input, with single values set over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.common import LONG_RETRY_S, OPTIONS, SHORT_RETRY_S, Options
from holdfast.cli.exit_codes import ExitCode, of_state
from holdfast.cli.job_follower import ProgressShow
from holdfast.cli.jobs import print_outcome
from holdfast.client.client import Client
from holdfast.errors import HoldfastError
from holdfast.formats import code_archive as code
from holdfast.formats import yaml_documents
from holdfast_service.views.jobs import JobView


class UnreadableSpec(HoldfastError):
    """The spec's file cannot be read or is no document."""

    code = "unreadable_spec"
    status = 400


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
        Parameter(name=("--file", "-f"), allow_leading_hyphen=True, help="The same, by an option."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="path.to.key=value, over the file's own."),
    ] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print what it resolves to, or what is wrong; no job.")
    ] = False,
    follow: Annotated[bool, Parameter(negative="", help="Show it until it has ended.")] = False,
    idempotency_key: Annotated[str | None, Parameter(help="Makes a repetition harmless.")] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Submit a job. Its id is all that is printed on stdout.

    With --follow the exit code is the job's: 0 succeeded, 1 failed, 7 cancelled. Ctrl-C then only
    stops looking: the job goes on.
    """
    source = spec or file
    if source is None or (spec and file) or (source.startswith("-") and source != "-"):
        raise UnreadableSpec("name one file, or - for standard input: holdfast submit job.yaml")
    document = read_spec(source, set_ or [])
    with options.connect(LONG_RETRY_S if follow else SHORT_RETRY_S) as client:
        if dry_run:
            resolved = client.validate(document)
            if not output.results(options, [resolved]):
                output.print_yaml(resolved)
            output.talk(Text.assemble(("ok", "green"), ": it would be accepted; no job was made"))
            return ExitCode.OK
        job = client.submit(document, idempotency_key=idempotency_key)
        if follow:
            return _followed(client, job, options)
        if not output.results(options, [job]):
            output.console().print(job.id)
        output.talk(*_suggestions(job))
    return ExitCode.OK


def read_spec(source: str, assignments: list[str]) -> dict[str, object]:
    """The document of a file or of standard input, with `--set` applied."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        document = yaml_documents.read(text)
        for assignment in assignments:
            yaml_documents.set_path(document, assignment)
        folder = code.named(document)
        if folder is not None and source != "-":  # a path in a file is seen from there
            document["code"] = str(Path(source).parent / folder)
    except (OSError, yaml_documents.DocumentError) as error:
        shown = "standard input" if source == "-" else source
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableSpec(f"{shown}: {message}") from error
    return document


def _followed(client: Client, job: JobView, options: Options) -> ExitCode:
    output.talk(f"job {job.id}")
    try:
        if options.plain:
            output.results(options, client.follow(job.id))
            job = client.get(job.id)
        else:
            job = ProgressShow(client, output.console()).follow(job.id)
            print_outcome(job)
    except KeyboardInterrupt:
        output.talk(*_detached(job))
        return ExitCode.INTERRUPTED
    return of_state(job.state)


def _suggestions(job: JobView) -> list[Text]:
    (word,) = output.ids([job.id])
    return [
        Text.assemble(("next", "bold"), f"  holdfast top {word}       its ranks, live"),
        Text(f"      holdfast logs {word} -f   what they write"),
        Text(f"      holdfast wait {word}      until it has ended; exits as it does"),
        Text(f"      holdfast cancel {word}    ends it, its last state saved"),
    ]


def _detached(job: JobView) -> list[Text]:
    (word,) = output.ids([job.id])
    return [
        Text.assemble("\n", ("detached", "bold"), f": job {job.name} goes on without you"),
        Text(f"  holdfast wait {word}      waits for its end"),
        Text(f"  holdfast cancel {word}    ends it, its last state saved"),
    ]
