"""`init_from` with `what: model`: the weights of all modules, by their names, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch import nn

from holdfast_workers.checkpoint.export import plan_export, write_export
from holdfast_workers.checkpoint.manifest import Manifest, checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.functions.function_recipe import FunctionRecipe
from holdfast_workers.functions.registry import Registry
from holdfast_workers.protocol.messages import InitPart, Restore, Tier
from holdfast_workers.protocol.processes import LoadOrder, LoadOutcome
from holdfast_workers.spec import ModelSpec, TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.rank_state import RankState, ShardBox, StateTensor
from holdfast_workers.training.recipe import World
from holdfast_workers.worker.initial_state import (
    CannotBegin,
    knows_all_weights,
    load_initial_state,
)
from holdfast_workers.worker.remote_loading import LoadBuffer

ALONE = {"dp_shard": 1, "tp": 1}


def _network(inputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 2), nn.BatchNorm1d(2))


class _Job:
    """A function of one rank that has registered `modules` and an optimizer of their parameters."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.recipe = FunctionRecipe(TrainingSpec(function="x:y"), Path("/nowhere"), lambda: print)
        self.recipe.build(World(0, 1, ALONE, 1, "cpu"))
        self.registry = self.recipe._registry = Registry(dict.fromkeys(ALONE, 0))
        self.modules = modules
        for name, module in modules.items():
            self.registry.add(name, module)
        if parameters := [p for module in modules.values() for p in module.parameters()]:
            self.registry.add("optimizer", torch.optim.Adam(parameters))

    def begun(self) -> _Job:
        self.recipe.close_registration()
        self.recipe.initialize()
        return self

    def saved(self, root: Path) -> Manifest:
        layout = self.recipe.layout()
        payload = memoryview(bytearray(layout.payload_bytes))
        self.recipe.write_state(payload, 7)
        checkpoint = open_storage(str(root)).below(checkpoint_folder(7, 1))
        record = save_shard(checkpoint, payload, layout, 0, 1, 7)
        return finalize(checkpoint, [record], ALONE, {})

    def load(self, uri: str, part: InitPart = InitPart.MODEL) -> None:
        def load(buffer: LoadBuffer, layout: StateLayout) -> None:
            exact = knows_all_weights(self.recipe.spec, ALONE)
            order = LoadOrder(1, 0, uri, ALONE, own=False, exact=exact)
            buffer.load(order, layout, Path("/nowhere"), _asks_nobody)

        load_initial_state(self.recipe, Restore(Tier.INIT, 0, uri=uri, what=part), load)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": value.clone()
            for name, module in self.modules.items()
            for key, value in module.state_dict().items()
        }


def _asks_nobody(_: LoadOrder) -> LoadOutcome:
    raise AssertionError("a folder is read by the rank itself")


def _trained(**modules: nn.Module) -> _Job:
    """Values that no seed gives, in every weight and in the optimizer's moments."""
    job = _Job(modules).begun()
    with job.registry.stepping(), torch.no_grad():
        for weight in (value for m in modules.values() for value in m.state_dict().values()):
            weight.copy_(torch.rand(weight.shape) * 100)
        for module in modules.values():
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
        job.registry.step()
    return job


@pytest.mark.parametrize("name", ["model", "net", "optim"])
def test_the_model_is_loaded_under_whatever_name_it_is_registered(
    name: str, tmp_path: Path
) -> None:
    trained = _trained(**{name: _network()})
    job = _Job({name: _network()}).begun()
    job.load(trained.saved(tmp_path).uri)
    for key, value in trained.weights().items():
        assert torch.equal(job.weights()[key], value), key
    optimizer = job.registry.optimizers["optimizer"]
    assert not optimizer.state, "the optimizer has the state of its seed"


def test_every_registered_module_is_loaded(tmp_path: Path) -> None:
    trained = _trained(actor=_network(), critic=_network(3))
    job = _Job({"critic": _network(3), "actor": _network()}).begun()
    job.load(trained.saved(tmp_path).uri)
    for key, value in trained.weights().items():
        assert torch.equal(job.weights()[key], value), key


@pytest.mark.parametrize(
    ("here", "why"),
    [
        ({"net": _network}, r"no net\.0\.weight.* has model\.0\.weight.*\(model there, net here\)"),
        (
            {"model": lambda: nn.Sequential(_network(), nn.Linear(2, 2))},
            r"no model\.0\.0\.weight.* has model\.0\.weight",
        ),
        (
            {"model": lambda: nn.Sequential(nn.Linear(2, 2))},
            r"step-00000007\.attempt-1 has model\.1\.weight.*, which this rank has not: .*export",
        ),
        ({"model": _network, "head": _network}, r"has no head\.0\.weight"),
    ],
)
def test_other_names_are_refused_with_those_of_both_sides(
    here: dict[str, Callable[[], nn.Module]], why: str, tmp_path: Path
) -> None:
    uri = _trained(model=_network()).saved(tmp_path).uri
    job = _Job({name: make() for name, make in here.items()}).begun()
    with pytest.raises(CannotBegin, match=why):
        job.load(uri)
    with pytest.raises(CannotBegin, match=why):
        job.load(uri, InitPart.EVERYTHING)


def test_a_state_without_weights_is_refused(tmp_path: Path) -> None:
    uri = _trained(model=_network()).saved(tmp_path).uri
    job = _Job({})
    job.registry.collect()
    job.registry.fix_layout(job.recipe.guard_memory.pieces(primary=True))
    with pytest.raises(CannotBegin, match=r"is a weight of a model\. Register the module"):
        job.load(uri)


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_stock_checkpoint_may_lack_the_name_of_the_only_module(
    prefix: str, tmp_path: Path
) -> None:
    trained = _network()
    saved = {prefix + name: value for name, value in trained.state_dict().items()}
    stock.save(dict(saved), checkpoint_id=tmp_path, no_dist=True)
    job = _Job({"net": _network()}).begun()
    job.load(f"dcp:{tmp_path}")
    assert torch.equal(job.weights()["net.0.weight"], trained.state_dict()["0.weight"])


@pytest.mark.parametrize(
    ("modules", "prefix"), [({"net": _network}, ""), ({"a": _network, "b": _network}, "a.")]
)
def test_an_export_has_the_weights_of_every_module(
    modules: dict[str, Callable[[], nn.Module]], prefix: str, tmp_path: Path
) -> None:
    trained = _trained(**{name: make() for name, make in modules.items()})
    manifest = trained.saved(tmp_path)
    with (tmp_path / "model.safetensors").open("w+b") as file:
        write_export(open_storage(manifest.uri), plan_export(manifest), file)
    found = load_file(tmp_path / "model.safetensors")
    first = next(iter(modules))
    assert len(found) == len(trained.weights())
    weight = trained.weights()[f"{first}.1.running_mean"]
    assert torch.equal(found[f"{prefix}1.running_mean"], weight)


def test_a_stage_and_a_users_recipe_may_name_a_part_of_the_weights() -> None:
    assert not knows_all_weights(TrainingSpec(function="x:y"), {"pp": 2})
    assert not knows_all_weights(TrainingSpec(recipe="x:Recipe"), ALONE)
    assert not knows_all_weights(TrainingSpec(), ALONE)
    library = ModelSpec.model_validate({"family": "transformers", "from": "/models/x"})
    assert knows_all_weights(TrainingSpec(model=library), ALONE)


def test_a_recipe_marks_its_weights_or_names_them() -> None:
    def piece(name: str, weight: bool | None = None) -> StateTensor:
        return StateTensor(name, torch.zeros(2), ShardBox((2,), (0,), (2,), True), weight)

    pieces = [piece("vector", True), piece("model.w"), piece("model.ema", False), piece("moment")]
    layout = RankState(pieces).layout
    assert [entry.name for entry in layout.tensors if entry.weight] == ["vector", "model.w"]
