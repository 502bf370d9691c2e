"""`doctor`: checks this machine and the server, prints advice, and frees orphaned memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import checks
from holdfast.cli.common import OPTIONS, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast_service.diagnosis.grades import Grade
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.memory.node_folder import free

MARKS = {
    Grade.GOOD: ("ok  ", "green"),
    Grade.ODD: ("note", "yellow"),
    Grade.BAD: ("BAD ", "bold red"),
}

WIDTH, CLUSTER_WIDTH = 10, 24
"""Widths of the column with the subjects of the checks, in characters."""


def doctor(
    *,
    data_dir: Annotated[
        Path | None, Parameter(help="Data directory of the server on this machine.")
    ] = None,
    port: Annotated[int, Parameter(help="Port of the server on this machine.")] = 8642,
    cluster: Annotated[
        bool,
        Parameter(negative="", help="Check every node of the server's cluster, not this machine."),
    ] = False,
    clean: Annotated[
        bool, Parameter(negative="", help="Free shared memory of nodes that are gone.")
    ] = False,
    options: Options = OPTIONS,
) -> ExitCode:
    """Check machine, ports, Ray, GPUs, disk and server; or all nodes of the cluster. The exit code
    is 8 if a check failed."""
    if clean:
        _clean()
    found = checks.run_cluster(options) if cluster else checks.run_all(data_dir, port, options)
    grades: set[Grade] = set()

    def graded() -> Iterator[checks.CheckResult]:
        for result in found:
            grades.add(result.grade)
            yield result

    if not output.results(options, (result.document() for result in graded())):
        for result in graded():
            _print(result, CLUSTER_WIDTH if cluster else WIDTH)
    return ExitCode.SERVER if Grade.BAD in grades else ExitCode.OK


def _clean() -> None:
    for orphan in checks.orphan_memory():
        size = orphan.nbytes()
        if free(orphan):
            output.progress(f"freed {orphan.path} ({size_of(size)})")


def _print(result: checks.CheckResult, width: int) -> None:
    mark, style = MARKS[result.grade]
    out = output.console()
    out.print(Text.assemble((mark, style), f"  {result.what:<{width}} {result.seen}"))
    if result.advice:
        out.print(Text.assemble(" " * (width + 7), ("→ ", "bold"), result.advice))
