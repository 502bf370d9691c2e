"""Exports are read back by TensorBoard and MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.service.fake_cluster import row
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
from holdfast_service.job_model.supervisor_protocol import Phase

STEPS = 5


@pytest.fixture
def job_with_own_metric(server: LiveServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job whose function records its own metric in every second step; three steps so far."""
    monkeypatch.setenv("HOLDFAST_ADDRESS", server.address)
    job_id = client.submit({**SPEC, "name": "told"}).id
    supervisor = server.supervisor(job_id)
    supervisor.form(1)
    supervisor.enter(Phase.RUNNING)
    run_steps(server, client, job_id, 1, 3)
    return job_id


def run_steps(server: LiveServer, client: Client, job_id: str, first: int, last: int) -> None:
    supervisor = server.supervisor(job_id)
    for step in range(first, last + 1):
        made = row(1, step, loss=10.0 - step)
        if step % 2:
            made.own["val/acc"] = step / 10
        supervisor.rows.append(made)
    supervisor.step = last
    eventually(lambda: client.get(job_id).progress.step == last)
    eventually(lambda: len(list(client.metrics(job_id))) == last)


def test_own_metrics_are_series_like_any_other(
    job_with_own_metric: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    points = list(client.metrics(job_with_own_metric, ["loss", "val/acc"]))
    assert [point.values for point in points] == [
        {"loss": 9.0, "val/acc": 0.1},
        {"loss": 8.0, "val/acc": None},
        {"loss": 7.0, "val/acc": 0.3},
    ]
    assert run(["metrics", "told"]) == ExitCode.OK
    assert "val/acc  now 0.3" in capsys.readouterr().out


@pytest.mark.seconds
def test_tensorboard_reads_an_export_and_a_second_export_replaces_it(
    job_with_own_metric: str, client: Client, server: LiveServer, tmp_path: Path
) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  (its reader is TensorBoard)

    def read() -> dict[str, dict[int, float]]:
        (file,) = tmp_path.glob("told-*/events.*")
        found: dict[str, dict[int, float]] = {}
        for raw in records(file.read_bytes()):
            event = Event.FromString(raw)
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
                    assert event.wall_time == 1000.0 + event.step
        return found

    assert run(["metrics", "told", "--tensorboard", str(tmp_path)]) == ExitCode.OK
    series = read()
    assert series["loss"] == {1: 9.0, 2: 8.0, 3: 7.0}
    assert series["val/acc"] == {1: pytest.approx(0.1), 3: pytest.approx(0.3)}
    assert {"lr", "grad_norm", "tokens_per_second"} <= set(series)
    run_steps(server, client, job_with_own_metric, 4, 4)
    assert run(["metrics", "told", "loss", "--tensorboard", str(tmp_path)]) == ExitCode.OK
    assert read() == {"loss": {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0}}


def records(raw: bytes) -> list[bytes]:
    """The records of a TensorFlow file: length, checksum, content, checksum."""
    found, offset = [], 0
    while offset < len(raw):
        length = int.from_bytes(raw[offset : offset + 8], "little")
        found.append(raw[offset + 12 : offset + 12 + length])
        offset += length + 16
    return found


@pytest.mark.slow
def test_mlflow_has_one_run_of_the_job_with_each_step_once(
    job_with_own_metric: str, client: Client, server: LiveServer, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    where = tmp_path / "mlruns"
    for last in (3, STEPS):
        if last == STEPS:
            run_steps(server, client, job_with_own_metric, 4, STEPS)
            server.supervisor(job_with_own_metric).end()
            eventually(lambda: client.get(job_with_own_metric).state.terminal)
        assert run(["metrics", "told", "--mlflow", str(where)]) == ExitCode.OK
        reader = MlflowClient(tracking_uri=where.as_uri())
        experiment = reader.get_experiment_by_name("holdfast")
        assert experiment is not None
        (found,) = reader.search_runs([experiment.experiment_id])
        history = reader.get_metric_history(found.info.run_id, "loss")
        assert [(point.step, point.value) for point in history] == [
            (step, 10.0 - step) for step in range(1, last + 1)
        ]
        assert all(point.timestamp == 1_000_000 + 1000 * point.step for point in history)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "told"
    assert found.data.params["train.steps"] == str(STEPS)
    assert found.data.metrics["val/acc"] == 0.5


def test_an_export_to_an_unwritable_folder_is_an_error(
    job_with_own_metric: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert run(["metrics", "told", "--tensorboard", str(tmp_path / "file")]) == ExitCode.USAGE
