"""The commands `data prepare` and `data show`: a job's data before any node trains on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.common import LONG_RETRY_S, OPTIONS, Assignments, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast.cli.submission.submit import read_spec
from holdfast_service.views.token_sets import DataPreparationView, SourceProgressView

if TYPE_CHECKING:
    from holdfast.client.synchronous.jobs import Client

POLL_S = 1.0
MOST_BAD = 5
COLUMNS = (
    Column("SOURCE", least=8),
    Column("FILES", right=True),
    Column("DOCUMENTS", right=True),
    Column("TOKENS", right=True),
    Column("HELD OUT", right=True),
    Column("LEFT OUT", right=True),
)

Spec = Annotated[
    str,
    Parameter(
        name="SPEC",
        allow_leading_hyphen=True,
        help="A YAML or JSON file; - for standard input.",
    ),
]


def prepare(spec: Spec, /, *, set_: Assignments = None, options: Options = OPTIONS) -> ExitCode:
    """Turn the sources of a job's data into tokens, on the cluster.

    A job does it by itself before it takes its nodes. What is there is not made again. Ctrl-C ends
    the display, and the work some minutes later; the next call goes on where it was.
    """
    document = read_spec(spec, set_ or [])
    with options.connect(LONG_RETRY_S) as client:
        found = _prepared(client, document)
    sources = [*found.sources, *([found.validation] if found.validation else [])]
    if not output.result(options, found):
        output.table(COLUMNS, [_row(source) for source in sources], whole=options.wide)
    for source in sources:
        _warn_of_bad(source)
    if not found.ready:
        output.progress(Text.assemble(("refused", "red"), f": {found.text}"))
        return ExitCode.JOB_FAILED
    output.progress(f"ready: {found.text}")
    return ExitCode.OK


def show(
    spec: Spec,
    /,
    *,
    samples: Annotated[int, Parameter(help="Number of samples.")] = 3,
    set_: Assignments = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Print the first samples of a job's data as the model will see them.

    The sources are prepared first, if they are not yet.
    """
    document = read_spec(spec, set_ or [])
    with options.connect(LONG_RETRY_S) as client:
        found = _prepared(client, document)
        if not found.ready:
            output.progress(Text.assemble(("refused", "red"), f": {found.text}"))
            return ExitCode.JOB_FAILED
        shown = client.samples({**document, "data": found.data}, samples)
    output.progress(f"ready: {found.text}")
    if output.results(options, list(shown)):
        return ExitCode.OK
    for sample in shown:
        title = f"sample {sample.position}, {sample.tokens} tokens of {sample.source}"
        output.console().print(Text(title, "bold"), soft_wrap=True)
        output.console().print(Text(sample.text), soft_wrap=True)
    return ExitCode.OK


group = App(name="data")
for command in (prepare, show):
    group.command(command)


def _prepared(client: Client, document: dict[str, Any]) -> DataPreparationView:
    """The preparation, shown until it is done."""
    with output.changing_line() as show:
        while not (found := client.prepare_data(document)).done:
            show(found.text)
            time.sleep(POLL_S)
    return found


def _row(source: SourceProgressView) -> list[str]:
    held_out, bad = source.held_out_tokens, source.bad_count
    counts = (source.files, source.documents, source.tokens, held_out, bad)
    return [source.path, *(f"{count:,}" for count in counts)]


def _warn_of_bad(source: SourceProgressView) -> None:
    for bad in source.bad[:MOST_BAD]:
        output.progress(f"left out: {bad}")
    if source.bad_count > MOST_BAD:
        output.progress(f"left out: {source.bad_count - MOST_BAD:,} more of {source.path}")
