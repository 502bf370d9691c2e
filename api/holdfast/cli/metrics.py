"""`metrics`: the series of a job, drawn in the terminal or as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli import output, plots
from holdfast.cli.common import OPTIONS, JobWord, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.client import Client
from holdfast_service.views import MetricPoint

USUAL = ("loss", "grad_norm", "tokens_per_second")
DRAWN = 1000
"""Points of a plot: more than any terminal has columns."""
WIDTH = 80


def metrics(
    job_word: JobWord,
    /,
    *names: Annotated[
        str,
        Parameter(name="NAMES", help="loss, grad_norm, lr, step_time_s, ...; default: the usual."),
    ],
    after_step: Annotated[int, Parameter(help="Only steps above this one.")] = 0,
    height: Annotated[int, Parameter(help="Lines of each plot.")] = 8,
    options: Options = OPTIONS,
) -> ExitCode:
    """Plot series of a job's committed history. With -o json: every point of them, a line each."""
    with options.connect() as client:
        job_id = client.find(job_word)
        if options.plain:
            output.results(options, client.metrics(job_id, names or None, after_step))
            return ExitCode.OK
        wanted = names or USUAL
        points = _points(client, job_id, wanted, after_step)
    if not points:
        output.talk("no step was made yet")
        return ExitCode.OK
    for number, name in enumerate(wanted):
        if number:
            output.console().print()
        _draw(name, points, max(2, height))
    return ExitCode.OK


def _points(
    client: Client, job_id: str, names: Sequence[str], after_step: int
) -> Sequence[MetricPoint]:
    found = client.thinned_metrics(job_id, names, most=DRAWN)
    return [point for point in found if point.step > after_step]


def _draw(name: str, points: Sequence[MetricPoint], height: int) -> None:
    series = plots.finite([(point.step, _number(point.values.get(name))) for point in points])
    out = output.console()
    if not series:
        out.print(f"{name}: not measured", style="dim")
        return
    last = series[-1][1]
    title = f"{name}  now {plots.label(last)}"
    head, *lines = plots.chart(title, series, output.width() or WIDTH, height)
    out.print(Text(head, style="bold"))
    for line in lines[:-1]:
        axis, _, drawn = line.partition("┤")
        out.print(Text.assemble((f"{axis}┤", "dim"), (drawn, "cyan")))
    out.print(Text(lines[-1], style="dim"))


def _number(value: float | int | str | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
