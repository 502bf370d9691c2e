"""The arguments of a `TorchTrainer` become a valid job, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train
from hypothesis import given
from hypothesis import strategies as st
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig

from holdfast.integrations.ray_train.errors import FunctionUnusable, NotServed
from holdfast.integrations.ray_train.job_document import (
    UNLIMITED,
    NodeSize,
    ShippedFunction,
    TrainerOptions,
    job_document,
    workers_per_node,
)
from holdfast.integrations.ray_train.rank_process import load
from holdfast.integrations.ray_train.shipped_datasets import shipped_datasets
from holdfast_service.job_model.job_spec import parse

FUNCTION = ShippedFunction("loop:train", Path("/code"))
NODES = [NodeSize(8, 0), NodeSize(8, 0)]


def document(config: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    options = TrainerOptions(
        config,
        given.get("torch", TorchConfig(backend="gloo")),
        given.get("scaling", ScalingConfig(num_workers=2)),
        given.get("run", RunConfig(name="spirals", storage_path="/shared")),
        given.get("datasets", {}),
    )
    return job_document(FUNCTION, options, NODES)


def parsed(found: dict[str, Any]) -> Any:
    return parse({**found, "code": "sha256:" + "0" * 64}, None)


def test_a_trainer_becomes_a_valid_job() -> None:
    scaling = ScalingConfig(
        num_workers=4, resources_per_worker={"CPU": 2, "scratch": 1}, label_selector={"disk": "ssd"}
    )
    run = RunConfig(
        name="spirals",
        storage_path="/shared",
        failure_config=FailureConfig(max_failures=-1, max_preemption_failures=7),
        checkpoint_config=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="loss"),
        worker_runtime_env={"env_vars": {"A": "b"}, "pip": ["einops"]},
    )
    found = document({"lr": 0.1}, scaling=scaling, run=run)
    assert found["code"] == "/code"
    spec = parsed(found)
    assert (spec.ray_train, spec.config, spec.parallel.dp_shard) == ("loop:train", {"lr": 0.1}, 4)
    assert (spec.ray_run.name, spec.ray_run.storage_path) == ("spirals", "/shared")
    assert (spec.ray_run.num_to_keep, spec.ray_run.score_attribute) == (3, "loss")
    assert (spec.resources.cpus_per_worker, spec.resources.workers_per_node) == (2, 4)
    assert spec.resources.custom == {"scratch": 1}
    assert spec.resources.node_labels == {"disk": ["ssd"]}
    assert (spec.recovery.max_failures, spec.recovery.max_preemptions) == (UNLIMITED, 7)
    assert (spec.env, spec.runtime_env.pip) == ({"A": "b"}, ["einops"])


def test_defaults_of_ray_train_become_a_valid_job_with_holdfasts_limits() -> None:
    found = document(run=RunConfig(), scaling=ScalingConfig())
    spec = parsed(found)
    assert spec.name.startswith("ray_train_run-")
    assert spec.recovery == parsed({"name": "x"}).recovery
    assert spec.ray_run.storage_path == str(Path("~/ray_results").expanduser())


def test_datasets_are_made_by_the_function_that_finds_them_in_the_code() -> None:
    assert parsed(document()).ray_run.datasets is None
    spec = parsed(document(datasets={"train": object()}))
    assert load(spec.ray_run.datasets) is shipped_datasets


def test_gpus_are_reserved() -> None:
    scaling = ScalingConfig(num_workers=2, use_gpu=True, accelerator_type="H100")
    spec = parsed(document(scaling=scaling, torch=TorchConfig(backend="nccl")))
    assert (spec.resources.gpus_per_worker, spec.resources.accelerator_type) == (1, "H100")
    assert spec.ray_run.backend == "nccl"


def test_a_range_of_workers_becomes_an_elastic_job() -> None:
    spec = parsed(document(scaling=ScalingConfig(num_workers=(2, 5))))
    assert [shape.world_size for shape in spec.shapes] == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"scaling": ScalingConfig(num_workers=0)}, "num_workers=0"),
        ({"scaling": ScalingConfig(num_workers=1, use_tpu=True)}, "use_tpu"),
        (
            {"scaling": ScalingConfig(num_workers=1, resources_per_worker={"memory": 1e9})},
            "resources_per_worker['memory']",
        ),
        ({"run": RunConfig(callbacks=[UserCallback()])}, "callbacks"),
        ({"run": RunConfig(storage_path="s3://bucket/runs")}, "s3://bucket/runs"),
        ({"run": RunConfig(worker_runtime_env={"conda": "env"})}, "conda"),
        ({"torch": TorchConfig(backend="gloo", init_method="tcp")}, "init_method"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(NotServed) as raised:
        document(**given)
    assert named in str(raised.value)


@pytest.mark.parametrize("value", [object(), {1: 2}, (1, 2), float("nan"), b"x"])
def test_a_configuration_that_json_would_change_is_refused_with_its_key(value: Any) -> None:
    with pytest.raises(FunctionUnusable, match="'widths'"):
        document({"widths": value})


@given(
    st.integers(1, 16),
    st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 1.0]),
    st.lists(st.builds(NodeSize, st.sampled_from([0, 1, 4, 8]), st.sampled_from([0, 1, 4]))),
)
def test_workers_are_divided_equally_and_fit_if_any_division_does(
    workers: int, strategy: str, cpus: float, gpus: float, nodes: list[NodeSize]
) -> None:
    count = workers_per_node(workers, strategy, cpus, gpus, nodes)
    assert workers % count == 0
    if strategy == "STRICT_PACK":
        assert count == workers
    elif strategy == "STRICT_SPREAD":
        assert count == 1
    elif strategy == "PACK" and count > 1:
        fitting = [node for node in nodes if node.cpus >= count * cpus]
        assert len([node for node in fitting if node.gpus >= count * gpus]) >= workers // count


def test_spread_takes_as_many_nodes_as_there_are() -> None:
    nodes = [NodeSize(64, 8)] * 3
    assert workers_per_node(6, "SPREAD", 1, 0, nodes) == 2
    assert workers_per_node(6, "PACK", 1, 0, nodes) == 6
    assert workers_per_node(2, "SPREAD", 1, 0, nodes) == 1


def test_the_supported_ray_has_no_option_that_is_unknown_here() -> None:
    """A new option of a later version must be mapped or refused."""
    scaling = set(ray.train.ScalingConfig.__dataclass_fields__)
    assert scaling == {
        *("trainer_resources", "num_workers", "use_gpu", "resources_per_worker"),
        *("placement_strategy", "accelerator_type", "label_selector", "use_tpu", "topology"),
        "elastic_resize_monitor_interval_s",
    }
