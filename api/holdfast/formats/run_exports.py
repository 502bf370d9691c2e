"""A job's series for other programs: TensorBoard's event files, MLflow's runs.

What is written is the committed history, each step once, at the time when it was made. Doing it
again is harmless: TensorBoard's file is written anew, a run of MLflow gets the steps it lacks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from holdfast.errors import HoldfastError
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView, MetricPoint

T = TypeVar("T")

SUFFIX = ".holdfast"
"""Of the event files that are ours."""
EXPERIMENT = "holdfast"
TAG_JOB, TAG_STEP = "holdfast.job", "holdfast.step"
_AT_ONCE, _PARAMETERS_AT_ONCE = 1000, 100
_LONGEST = 500


class ExportFailed(HoldfastError):
    """The series could not be written there."""

    code = "export_failed"
    status = 400


def to_tensorboard(job: JobView, points: Iterable[MetricPoint], folder: Path) -> Path:
    """Write a run's event file below `folder`; its own folder there. Raises ExportFailed."""
    writers = _library("tensorboardX", "tensorboard")
    run = folder / f"{job.name}-{job.id[:13]}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        for former in run.glob(f"events.*{SUFFIX}"):
            former.unlink()
        with writers.SummaryWriter(str(run), filename_suffix=SUFFIX) as writer:
            spec = yaml.safe_dump(job.spec, sort_keys=False)
            writer.add_text("spec", f"```\n{spec}```", walltime=job.created_at)
            for point in points:
                for name, value in _numbers(point):
                    writer.add_scalar(name, value, point.step, walltime=point.at)
    except OSError as error:
        raise ExportFailed(f"{run}: {error.strerror or error}") from error
    return run


def to_mlflow(job: JobView, points: Iterable[MetricPoint], where: str) -> str:
    """Write into the run of this job at a tracking server, a database or a folder: the run's id.
    Raises ExportFailed."""
    tracking = _library("mlflow.tracking", "mlflow")
    entities = _library("mlflow.entities", "mlflow")
    errors = _library("mlflow.exceptions", "mlflow")
    if "://" not in where:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # that is what was asked for
        where = Path(where).resolve().as_uri()
    try:
        client = tracking.MlflowClient(tracking_uri=where)
        run, done = _run_of(job, client, entities)
        last = done
        for some in _batches(_metrics(points, done, entities), _AT_ONCE):
            client.log_batch(run, metrics=some)
            last = max(last, some[-1].step)
        client.set_tag(run, TAG_STEP, str(last))
        ended = None if job.ended_at is None else round(job.ended_at * 1000)
        if job.state.terminal:
            client.set_terminated(run, _STATUS[job.state], end_time=ended)
    except (errors.MlflowException, OSError) as error:
        raise ExportFailed(f"{where}: {error}") from error
    return str(run)


_STATUS: Mapping[State, str] = {
    State.SUCCEEDED: "FINISHED",
    State.FAILED: "FAILED",
    State.CANCELLED: "KILLED",
}


def _run_of(job: JobView, client: Any, entities: Any) -> tuple[str, int]:
    """The run of this job, made if there is none, and up to which step it has been written."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    place = client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id
    for found in client.search_runs([place], filter_string=f"tags.`{TAG_JOB}` = '{job.id}'"):
        return found.info.run_id, int(found.data.tags.get(TAG_STEP, "0"))
    started = round((job.started_at or job.created_at) * 1000)
    tags = {TAG_JOB: job.id, TAG_STEP: "0"}
    made = client.create_run(place, start_time=started, tags=tags, run_name=job.name)
    parameters = [entities.Param(name, value) for name, value in _flat(job.spec)]
    for some in _batches(parameters, _PARAMETERS_AT_ONCE):
        client.log_batch(made.info.run_id, params=some)
    return made.info.run_id, 0


def _metrics(points: Iterable[MetricPoint], after: int, entities: Any) -> Iterator[Any]:
    for point in points:
        if point.step > after:
            for name, value in _numbers(point):
                yield entities.Metric(name, value, round(point.at * 1000), point.step)


def _numbers(point: MetricPoint) -> Iterator[tuple[str, float]]:
    for name, value in point.values.items():
        if isinstance(value, int | float):
            yield name, float(value)


def _batches(things: Iterable[T], most: int) -> Iterator[list[T]]:
    source = iter(things)
    while some := list(islice(source, most)):
        yield some


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Settings by their paths; without empty ones."""
    for name, value in values.items():
        path = re.sub(r"[^\w./ -]", "_", f"{above}{name}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif value is not None:
            yield path, str(value)[:_LONGEST]


def _library(module: str, extra: str) -> Any:
    """A library that need not be there. Raises ExportFailed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(module)
    raise ExportFailed(
        f"{module.partition('.')[0]} is not installed: pip install holdfast[{extra}]"
    )
