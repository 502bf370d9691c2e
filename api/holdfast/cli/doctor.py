"""`doctor`: looks at this machine and at the server, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import checks, output
from holdfast.cli.common import OPTIONS, Options
from holdfast.cli.exit_codes import ExitCode

MARKS = {
    checks.Grade.GOOD: ("ok  ", "green"),
    checks.Grade.ODD: ("note", "yellow"),
    checks.Grade.BAD: ("BAD ", "bold red"),
}


def doctor(
    *,
    data_dir: Annotated[
        Path | None, Parameter(help="Of the server that is, or would be, run here.")
    ] = None,
    port: Annotated[int, Parameter(help="That it would listen on.")] = 8642,
    options: Options = OPTIONS,
) -> ExitCode:
    """Check machine, ports, Ray, GPUs, disk and server. The exit code is 8 if something is bad."""
    found = []
    for finding in checks.every(data_dir, port, options):
        found.append(finding)
        if options.plain:
            output.results(options, [finding.document()])
        else:
            _print(finding)
    return ExitCode.SERVER if any(item.grade is checks.Grade.BAD for item in found) else ExitCode.OK


def _print(finding: checks.Finding) -> None:
    word, style = MARKS[finding.grade]
    out = output.console()
    out.print(Text.assemble((word, style), f"  {finding.what:<10} {finding.seen}"))
    if finding.advice:
        out.print(Text.assemble(" " * 17, ("→ ", "bold"), finding.advice))
