"""Exports the series of a job: to TensorBoard event files and to MLflow runs.

The committed history is written, each step once, with the time of the step. An export can be
repeated: the TensorBoard file is rewritten, and an MLflow run gets the missing steps.
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
from holdfast_service.extras import Extra, install_command
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.history import MetricPoint
from holdfast_service.views.jobs import JobView

T = TypeVar("T")

SUFFIX = ".holdfast"
"""The suffix of the event files that Holdfast writes."""
EXPERIMENT = "holdfast"
TAG_JOB, TAG_STEP = "holdfast.job", "holdfast.step"
_METRICS_PER_REQUEST, _PARAMETERS_PER_REQUEST = 1000, 100
_MAX_PARAMETER_LENGTH = 500


class ExportFailed(HoldfastError, code="export_failed", status=400):
    """The series could not be written."""


def to_tensorboard(job: JobView, points: Iterable[MetricPoint], folder: Path) -> Path:
    """Write a run's event file; returns the run's folder below `folder`. Raises ExportFailed."""
    tensorboard = _library("tensorboardX", Extra.TENSORBOARD)
    run = folder / f"{job.name}-{job.id[:13]}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        for old_file in run.glob(f"events.*{SUFFIX}"):
            old_file.unlink()
        with tensorboard.SummaryWriter(str(run), filename_suffix=SUFFIX) as writer:
            spec = yaml.safe_dump(job.spec, sort_keys=False)
            writer.add_text("spec", f"```\n{spec}```", walltime=job.created_at)
            for point in points:
                for name, value in _numbers(point):
                    writer.add_scalar(name, value, point.step, walltime=point.at)
    except OSError as error:
        raise ExportFailed(f"{run}: {error.strerror or error}") from error
    return run


def to_mlflow(job: JobView, points: Iterable[MetricPoint], target: str) -> str:
    """Write the run of this job to a tracking server, a database or a folder; returns the run's id.
    Raises ExportFailed."""
    tracking = _library("mlflow.tracking", Extra.MLFLOW)
    entities = _library("mlflow.entities", Extra.MLFLOW)
    errors = _library("mlflow.exceptions", Extra.MLFLOW)
    if "://" not in target:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user chose a folder
        target = Path(target).resolve().as_uri()
    try:
        client = tracking.MlflowClient(tracking_uri=target)
        run, done = _find_or_create_run(job, client, entities)
        last = done
        for batch in _batches(_metrics(points, done, entities), _METRICS_PER_REQUEST):
            client.log_batch(run, metrics=batch)
            last = max(last, batch[-1].step)
        client.set_tag(run, TAG_STEP, str(last))
        ended = None if job.ended_at is None else round(job.ended_at * 1000)
        if job.state.terminal:
            client.set_terminated(run, _STATUS[job.state], end_time=ended)
    except (errors.MlflowException, OSError) as error:
        raise ExportFailed(f"{target}: {error}") from error
    return str(run)


_STATUS: Mapping[State, str] = {
    State.SUCCEEDED: "FINISHED",
    State.FAILED: "FAILED",
    State.CANCELLED: "KILLED",
}


def _find_or_create_run(job: JobView, client: Any, entities: Any) -> tuple[str, int]:
    """The id of the run of this job, created if necessary, and the last step written to it;
    -1: none."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        experiment_id = client.create_experiment(EXPERIMENT)
    else:
        experiment_id = experiment.experiment_id
    of_job = f"tags.`{TAG_JOB}` = '{job.id}'"
    for found in client.search_runs([experiment_id], filter_string=of_job):
        return found.info.run_id, int(found.data.tags.get(TAG_STEP, "-1"))
    started = round((job.started_at or job.created_at) * 1000)
    tags = {TAG_JOB: job.id, TAG_STEP: "-1"}
    created = client.create_run(experiment_id, start_time=started, tags=tags, run_name=job.name)
    parameters = [entities.Param(name, value) for name, value in _flat(job.spec)]
    for batch in _batches(parameters, _PARAMETERS_PER_REQUEST):
        client.log_batch(created.info.run_id, params=batch)
    return created.info.run_id, -1


def _metrics(points: Iterable[MetricPoint], after: int, entities: Any) -> Iterator[Any]:
    for point in points:
        if point.step > after:
            for name, value in _numbers(point):
                yield entities.Metric(name, value, round(point.at * 1000), point.step)


def _numbers(point: MetricPoint) -> Iterator[tuple[str, float]]:
    for name, value in point.values.items():
        if isinstance(value, int | float):
            yield name, float(value)


def _batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    source = iter(values)
    while batch := list(islice(source, size)):
        yield batch


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings with their dotted paths, without empty ones."""
    for name, value in values.items():
        path = re.sub(r"[^\w./ -]", "_", f"{prefix}{name}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif value is not None:
            yield path, str(value)[:_MAX_PARAMETER_LENGTH]


def _library(module: str, extra: Extra) -> Any:
    """An optional library. Raises ExportFailed if it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(module)
    raise ExportFailed(f"{module.partition('.')[0]} is not installed: {install_command(extra)}")
