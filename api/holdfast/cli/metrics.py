"""`metrics`: plots the series of a job, prints them as documents, or exports them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.common import OPTIONS, JobWord, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output, plots
from holdfast.client.synchronous.jobs import Client
from holdfast_service.views.history import MetricPoint
from holdfast_workers.protocol.metrics import METRICS

DEFAULT_NAMES = ("loss", "grad_norm", "tokens_per_second")
MAX_PLOT_POINTS = 1000
"""Number of points that are plotted at most: more than any terminal has columns."""
WIDTH = 80


def metrics(
    job_word: JobWord,
    /,
    *names: Annotated[
        str,
        Parameter(
            name="NAMES",
            help="loss, grad_norm, lr, step_time_s, ...; default: three of them and the job's own.",
        ),
    ],
    after_step: Annotated[int | None, Parameter(help="Only steps above this one.")] = None,
    height: Annotated[int, Parameter(help="Lines of each plot.")] = 8,
    tensorboard: Annotated[
        Path | None, Parameter(help="Write event files into this folder; plot nothing.")
    ] = None,
    mlflow: Annotated[
        str | None,
        Parameter(help="Write a run to this tracking server, database or folder; plot nothing."),
    ] = None,
    options: Options = OPTIONS,
) -> ExitCode:
    """Plot series of a job's committed history, including the job's own metrics.

    With -o json: every point, a line each. An export to TensorBoard or MLflow can be repeated: it
    adds the new steps.
    """
    with options.connect() as client:
        job_id = client.find(job_word)
        if tensorboard is not None or mlflow is not None:
            _export(client, job_id, names, tensorboard, mlflow)
            return ExitCode.OK
        if options.plain:
            output.results(options, client.metrics(job_id, names or None, after_step))
            return ExitCode.OK
        points = _points(client, job_id, names or None, after_step)
    if not points:
        output.progress("no step has been made yet")
        return ExitCode.OK
    for number, name in enumerate(names or _default_names(points)):
        if number:
            output.console().print()
        _draw(name, points, max(2, height))
    return ExitCode.OK


def _points(
    client: Client, job_id: str, names: Sequence[str] | None, after_step: int | None
) -> Sequence[MetricPoint]:
    found = client.thinned_metrics(job_id, names, most=MAX_PLOT_POINTS)
    return [point for point in found if after_step is None or point.step > after_step]


def _default_names(points: Sequence[MetricPoint]) -> tuple[str, ...]:
    own = {name for point in points for name in point.values} - METRICS.keys()
    return (*DEFAULT_NAMES, *sorted(own))


def _export(
    client: Client,
    job_id: str,
    names: Sequence[str],
    tensorboard: Path | None,
    mlflow: str | None,
) -> None:
    from holdfast.formats import run_exports  # late: plots do not need it

    job = client.get(job_id)
    if tensorboard is not None:
        run = run_exports.to_tensorboard(job, client.metrics(job_id, names or None), tensorboard)
        output.progress(f"written to {run}; show it with: tensorboard --logdir {tensorboard}")
    if mlflow is not None:
        run_id = run_exports.to_mlflow(job, client.metrics(job_id, names or None), mlflow)
        output.progress(
            f"written to run {run_id} of experiment {run_exports.EXPERIMENT} at {mlflow}"
        )


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
        axis, _, curve = line.partition("┤")
        out.print(Text.assemble((f"{axis}┤", "dim"), (curve, "cyan")))
    out.print(Text(lines[-1], style="dim"))


def _number(value: float | int | str | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
