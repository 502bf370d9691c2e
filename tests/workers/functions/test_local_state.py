"""State that differs from rank to rank by nature, such as running statistics: every rank gets its
own back, and a comparison of replicas does not take it for corruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.ranks import function_programs as programs
from tests.support.ranks.rank_worlds import Worlds
from torch.distributed.checkpoint import FileSystemReader

from holdfast_workers.checkpoint.export import plan_export, write_export
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import checkpoint_folder, read_manifest
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import SMALL_STATE

pytestmark = pytest.mark.seconds
STEPS, SAVED = 5, 3
REPLICAS = {"dp_replicate": 2}
MEAN = "layers.1.running_mean"


def spec(parallel: dict[str, int] = REPLICAS) -> TrainingSpec:
    """A model with BatchNorm, and an object with the number of its rank."""
    return TrainingSpec.model_validate(
        {
            "function": "tests.support.ranks.functions:everything",
            "train": {"steps": STEPS, "global_batch": 12, "micro_batch": 2, "seed": 5},
            "parallel": parallel,
        }
    )


def test_running_statistics_of_replicas_are_not_compared_and_each_rank_gets_its_own_back(
    worlds: Worlds, tmp_path: Path
) -> None:
    whole = worlds.run(programs.trained, spec(), tmp_path)
    assert whole[0]["digests"].keys() == set(range(STEPS + 1))
    for rank in worlds.run(programs.trained, spec(), tmp_path, SAVED):
        assert rank["digests"] == {s: whole[0]["digests"][s] for s in range(SAVED, STEPS + 1)}


@pytest.mark.parametrize("name", ["layers.0.weight", "layers.1.bias"])
def test_a_bit_that_flips_in_a_parameter_beside_them_is_found(worlds: Worlds, name: str) -> None:
    for found in worlds.run(programs.flipped, spec(), name, SAVED):
        assert f"replicas of the state after step {SAVED} differ" in found


def save_remotely(
    worlds: Worlds, root: Path, parallel: dict[str, int]
) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of the remote tier, and what each rank returned of its run."""
    folder = root / checkpoint_folder(SAVED, 1)
    ranks = worlds.run(programs.saved_remotely, spec(parallel), folder, SAVED)
    records = [json.loads(json.dumps(rank["record"])) for rank in ranks]
    finalize(LocalStorage(folder), records, spec(parallel).parallel.mesh, {})
    assert ranks[0]["state"][MEAN] != ranks[1]["state"][MEAN]
    return folder, ranks


@pytest.fixture(scope="module")
def saved(
    worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    return save_remotely(worlds, tmp_path_factory.mktemp("remote"), REPLICAS)


@pytest.mark.parametrize("parallel", [REPLICAS, {"dp_shard": 2}])
def test_from_the_remote_tier_too_each_rank_gets_its_own_values_back(
    worlds: Worlds, tmp_path: Path, parallel: dict[str, int]
) -> None:
    folder, before = save_remotely(worlds, tmp_path, parallel)
    again = worlds.run(programs.restored_remotely, spec(parallel), folder, SAVED)
    for rank, restored in enumerate(again):
        assert restored["state"] == before[rank]["state"]
        digests = before[rank]["digests"]
        assert restored["digests"] == {s: digests[s] for s in range(SAVED, STEPS + 1)}


@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 3}])
def test_ranks_of_another_mesh_take_the_values_of_the_first_rank(
    worlds: Worlds, saved: tuple[Path, list[Any]], parallel: dict[str, int]
) -> None:
    folder, before = saved
    for again in worlds.run(programs.restored_remotely, spec(parallel), folder, SAVED):
        assert again["state"] == before[0]["state"]


def test_a_checkpoint_of_0_1_which_has_the_first_ranks_values_only_is_loaded(
    worlds: Worlds, saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, before = saved
    former = tmp_path / folder.name
    former.mkdir()
    for file in folder.glob("*.distcp"):
        shutil.copy(file, former)
    records = [json.loads(json.dumps(rank["record"])) for rank in before]
    for record in records:
        record["tensors"] = [
            tensor
            for tensor in record["tensors"]
            if not tensor["per_rank"] or tensor["name"] == SMALL_STATE
        ]
    finalize(LocalStorage(former), records, spec().parallel.mesh, {})
    for again in worlds.run(programs.restored_remotely, spec(), former, SAVED):
        assert again["state"] == before[0]["state"]


def test_an_exported_model_has_the_values_of_the_first_rank_once(
    saved: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, before = saved
    plan = plan_export(read_manifest(LocalStorage(folder)))
    exported = tmp_path / "model.safetensors"
    with exported.open("w+b") as target:
        write_export(LocalStorage(folder), plan, target)
    values = {name: value.tolist() for name, value in load_file(exported).items()}
    for name, value in before[0]["state"].items():
        assert values[f"model.{name}"] == value
    assert {name.partition(".")[0] for name in values} == {"model", "average"}


def test_stock_torch_finds_one_rank_s_values_in_the_model(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    metadata = FileSystemReader(saved[0]).read_metadata()
    beside = {name for name in metadata.state_dict_metadata if ".rank" in name}
    assert f"holdfast.rank1.model.{MEAN}" in beside
    assert not [name for name in beside if name.startswith(("model.", "average."))]
