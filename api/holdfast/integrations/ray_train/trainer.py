"""`TorchTrainer` with Ray Train's constructor, whose `fit()` runs a job of a Holdfast server.

    from holdfast.integrations.ray_train import TorchTrainer

The server is found as by the client (`HOLDFAST_ADDRESS`, or `holdfast login`). The folder of the
training function's module is sent with the job.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.integrations.ray_train import versions

versions.check(versions.installed())  # before anything of Ray is imported

# ruff: noqa: E402
from ray.train import Checkpoint, DataConfig, Result, TrainingFailedError
from ray.train.torch import TorchTrainer as StockTrainer

from holdfast.cli.printing import output
from holdfast.cli.submission.job_follower import JobFollower
from holdfast.client.synchronous.jobs import Client
from holdfast.integrations.ray_train import run_folder, shipped_datasets
from holdfast.integrations.ray_train.errors import FunctionUnusable, NotServed
from holdfast.integrations.ray_train.job_document import (
    NodeSize,
    TrainerOptions,
    job_document,
)
from holdfast.integrations.ray_train.shipped_function import shipped
from holdfast_service.job_model.lifecycle import State
from holdfast_service.policy.quarantine import NodeStanding
from holdfast_service.views.jobs import JobView
from holdfast_service.views.nodes import NodeView
from holdfast_workers.protocol.programs import SOCKET_VARIABLE

RETRY_S = 60.0
"""How long a server may be away while the job is followed."""

FEWEST_POINTS = 16
"""The fewest points to which the server thins a series; the last point is always among them."""


class JobNotSucceeded(TrainingFailedError):  # type: ignore[misc]  # Ray has no types
    """The job of `fit()` failed or was cancelled. `job_id`: its id; `result`: what it left."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.result: Result | None = None


class TorchTrainer(StockTrainer):  # type: ignore[misc]  # Ray has no types
    """Takes the arguments of `ray.train.torch.TorchTrainer`; `fit()` refuses those that Holdfast
    does not serve."""

    def fit(self) -> Result:
        """Submit the job, show its progress until it has ended, and return its result.

        Metrics are those of the last `report`. Raises NotServed and FunctionUnusable before
        anything is submitted, InvalidSpec, and JobNotSucceeded, a `TrainingFailedError`.
        """
        if SOCKET_VARIABLE in os.environ:
            raise FunctionUnusable(
                "fit() was called by a rank, which imported the program: call it below "
                'if __name__ == "__main__":'
            )
        with Client(retry_s=RETRY_S) as client:
            document = self._document(client)
            job = self._submit(client, document)
            output.progress(f"job {job.id}")
            job = JobFollower(client, output.console()).follow(job.id)
            folder = Path(document["ray_run"]["storage_path"]) / (self.run_config.name or job.id)
            metrics = _last_metrics(client, job)
        return _result(job, folder, metrics)

    def _submit(self, client: Client, document: dict[str, Any]) -> JobView:
        if not self.datasets:
            return client.submit(document)
        folder = Path(document["code"]) if "code" in document else None
        with TemporaryDirectory() as package:
            shipped_datasets.write_package(folder, self.datasets, Path(package))
            return client.submit({**document, "code": package})

    def _document(self, client: Client) -> dict[str, Any]:
        if self.validation_config is not None:
            raise NotServed("not served by Holdfast: validation_config: validate in the function")
        if self.datasets and not _is_default(self.data_config):
            raise NotServed(
                "not served by Holdfast: dataset_config: leave it out; all datasets are split, in "
                "their own order"
            )
        cluster = client.cluster().nodes
        nodes = [NodeSize(node.cpus, node.gpus) for node in cluster if _is_usable(node)]
        options = TrainerOptions(
            self.train_loop_config,
            self.backend_config,
            self.scaling_config,
            self.run_config,
            self.datasets,
        )
        return job_document(shipped(self.train_loop_per_worker), options, nodes)


def _is_default(config: Any) -> bool:
    return (
        type(config) is DataConfig
        and config._datasets_to_split == "all"
        and config._user_execution_options is None
    )


def _is_usable(node: NodeView) -> bool:
    return node.there and node.state is NodeStanding.READY


def _result(job: JobView, folder: Path, metrics: dict[str, Any]) -> Result:
    """The result of the job: from the run's folder if this machine sees it, else from the server.
    Raises JobNotSucceeded."""
    saved = run_folder.read_list(folder)
    ended = run_folder.read_result(folder) or {}
    error = None
    if job.state is not State.SUCCEEDED:
        why = f"{job.outcome.code}: {job.outcome.message}" if job.outcome else job.state.value
        details = job.outcome.traceback if job.outcome else None
        error = JobNotSucceeded(f"job {job.id} {why}\n{details or ''}".rstrip(), job.id)
    result = Result(
        metrics=ended.get("metrics") or metrics or None,
        checkpoint=Checkpoint(saved[-1].path) if saved else None,
        error=error,
        path=str(folder),
        metrics_dataframe=_data_frame([each.metrics for each in saved]),
        best_checkpoints=[(Checkpoint(each.path), each.metrics) for each in saved],
        return_value=ended.get("return_value"),
    )
    if error is not None:
        error.result = result
        raise error
    return result


def _data_frame(metrics: list[dict[str, Any]]) -> Any:
    pandas = importlib.import_module("pandas")  # Ray Train has imported it
    return pandas.DataFrame(metrics) if metrics else None


def _last_metrics(client: Client, job: JobView) -> dict[str, Any]:
    """The numbers of the job's last step."""
    points = client.thinned_metrics(job.id, most=FEWEST_POINTS)
    if not points:
        return {}
    return {name: value for name, value in points[-1].values.items() if value is not None}
