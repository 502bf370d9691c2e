"""One run's checkpoint as another run's initial state, and as a plain model file; real agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open
from safetensors.torch import load_file
from tests.support.checkpoint.model_checkpoint import export_folder
from tests.support.nodes.supervised import SupervisedRun, small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_service.placement.restore_points import InitialCheckpoint
from holdfast_workers.checkpoint.export import plan_export, write_export
from holdfast_workers.checkpoint.manifest import Manifest, list_checkpoints
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.models.llama import Llama
from holdfast_workers.models.llama_parameters import parameter_shapes
from holdfast_workers.protocol.messages import InitPart, Restore, Tier
from holdfast_workers.protocol.processes import LoadOrder, LoadOutcome
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import (
    CheckpointSpec,
    ModelSpec,
    ParallelSpec,
    RemoteTierSpec,
    TrainingSpec,
)
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout
from holdfast_workers.training.recipe import World
from holdfast_workers.worker.initial_state import CannotBegin, load_initial_state
from holdfast_workers.worker.remote_loading import LoadBuffer

ONE = {"dp_shard": 1, "tp": 1}
EVERY_3 = CheckpointSpec(remote=RemoteTierSpec(every_steps=3))


@dataclass(frozen=True)
class First:
    """The results of the first run."""

    training: TrainingSpec
    digests: dict[int, str]
    rows: dict[int, Any]
    at_3: Manifest
    cache: Path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[First]:
    folder = tmp_path_factory.mktemp("first")
    training = small_training(6, blocks=2, checkpoint=EVERY_3)
    # Otherwise step 6 might supersede step 3 before step 3 is saved.
    slow = {"point": "forward", "rank": 0, "step": 4, "action": "slow", "factor": 20.0, "steps": 2}
    with supervised(folder, training, standbys=0, chaos=[slow]) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        at_6, at_3 = list_checkpoints(open_storage(str(run.remote_root)))
        assert (at_6.step, at_3.step) == (6, 3)
        yield First(training, run.digests, run.rows, at_3, folder / "job" / "cache")


def _ended_well(run: SupervisedRun, first: First, part: InitPart, step: int) -> None:
    assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
    (event,) = run.of(EventKind.INITIALISED_FROM)
    assert event == {"attempt": 1, "uri": first.at_3.uri, "step": step, "what": part.value}


def _origin(first: First, part: InitPart) -> dict[str, Any]:
    step = first.at_3.step if part is InitPart.EVERYTHING else 0
    return {"origin": InitialCheckpoint(first.at_3.uri, step, part)}


@pytest.mark.slow
def test_the_manifest_contains_the_loss_of_its_step(first: First) -> None:
    assert first.at_3.metrics["loss"] == first.rows[3].loss


@pytest.mark.seconds
def test_another_job_continues_with_the_same_bits(first: First, tmp_path: Path) -> None:
    origin = _origin(first, InitPart.EVERYTHING)
    with supervised(tmp_path, first.training, standbys=0, config=origin) as run:
        _ended_well(run, first, InitPart.EVERYTHING, 3)
        assert sorted(run.rows) == [4, 5, 6]
        assert {step: run.digests[step] for step in (3, 4, 5, 6)} == {
            step: first.digests[step] for step in (3, 4, 5, 6)
        }


@pytest.mark.slow
def test_on_another_mesh_a_job_continues_with_the_same_values_and_samples(
    first: First, tmp_path: Path
) -> None:
    training = first.training.model_copy(update={"parallel": ParallelSpec(dp_shard=2, tp=1)})
    origin = _origin(first, InitPart.EVERYTHING)
    with supervised(tmp_path, training, standbys=0, config=origin) as run:
        _ended_well(run, first, InitPart.EVERYTHING, 3)
        for step in (4, 5, 6):
            assert run.rows[step].samples == first.rows[step].samples
            assert run.rows[step].loss == pytest.approx(first.rows[step].loss, rel=1e-5)


# --- in this process, on a mesh of size 1 ---------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(first: First) -> PretrainRecipe:
    return _built(first, first.training.model)


def _built(first: First, model: ModelSpec) -> PretrainRecipe:
    alone = first.training.model_copy(update={"parallel": ParallelSpec(), "model": model})
    recipe = PretrainRecipe(alone, first.cache)
    recipe.prepare()
    recipe.build(World(0, 1, ONE, attempt=1, device="cpu"))
    return recipe


def _asks_nobody(_: LoadOrder) -> LoadOutcome:
    raise AssertionError("a folder is read by the rank itself")


def _begin(recipe: PretrainRecipe, uri: str, part: InitPart, step: int = 0) -> dict[str, Any]:
    """The state after loading: the values of every entry by name."""
    restore = Restore(Tier.INIT, step, uri=uri, what=part)

    def load(buffer: LoadBuffer, layout: StateLayout) -> None:
        order = LoadOrder(1, 0, uri, ONE, own=False)
        buffer.load(order, layout, Path("/nowhere"), _asks_nobody)

    load_initial_state(recipe, restore, load)
    payload = memoryview(bytearray(recipe.layout().payload_bytes))
    recipe.write_state(payload, recipe.applied_step)
    return {
        entry.name: np.frombuffer(payload, np.float32, entry.nbytes // 4, entry.offset)
        for entry in recipe.layout().tensors
        if entry.dtype == "float32"
    }


def _saved(first: First) -> dict[str, np.ndarray]:
    """The content of the checkpoint, as stock torch reads it."""
    shapes = {tensor.name: tensor.global_shape for tensor in first.at_3.tensors}
    state = {
        name: torch.empty(shape)
        for name, shape in shapes.items()
        if name.startswith((MODEL_PREFIX, "optim."))
    }
    stock.load(state, checkpoint_id=first.at_3.uri, no_dist=True)
    return {name: tensor.numpy().ravel() for name, tensor in state.items()}


@pytest.mark.seconds
def test_everything_includes_every_tensor_and_the_step(
    first: First, recipe: PretrainRecipe
) -> None:
    state = _begin(recipe, first.at_3.uri, InitPart.EVERYTHING, step=3)
    assert recipe.applied_step == 3
    saved = _saved(first)
    assert set(saved) == set(state)
    for name, values in saved.items():
        assert np.array_equal(state[name], values), name


def test_the_model_alone_loads_parameters_and_starts_at_step_0(
    first: First, recipe: PretrainRecipe
) -> None:
    state = _begin(recipe, first.at_3.uri, InitPart.MODEL)
    assert recipe.applied_step == 0
    for name, values in _saved(first).items():
        expected = values if name.startswith(MODEL_PREFIX) else np.zeros_like(values)
        assert np.array_equal(state[name], expected), name


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", MODEL_PREFIX])
def test_a_stock_torch_checkpoint_is_a_valid_initial_state(
    first: First, recipe: PretrainRecipe, tmp_path: Path, prefix: str
) -> None:
    torch.manual_seed(1)
    shapes = parameter_shapes(first.training.model, 256)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    others = {"optimizer.step": torch.ones(1), "epoch": 3}
    saved = {**{prefix + name: tensor for name, tensor in state.items()}, **others}
    stock.save(saved, checkpoint_id=tmp_path / "stock", no_dist=True)
    got = _begin(recipe, f"dcp:{tmp_path / 'stock'}", InitPart.MODEL)
    for name, tensor in state.items():
        assert np.array_equal(got[MODEL_PREFIX + name], tensor.numpy().ravel()), name


def test_names_that_do_not_fit_a_stock_checkpoint_are_listed(
    first: First, recipe: PretrainRecipe, tmp_path: Path
) -> None:
    shapes = parameter_shapes(first.training.model, 256)
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    state["norm.weight"] = torch.zeros(3)
    state["heads.weight"] = state.pop("head.weight")
    stock.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(CannotBegin) as caught:
        _begin(recipe, f"dcp:{tmp_path / 'stock'}", InitPart.MODEL)
    for text in ("missing: head.weight", "unexpected: heads.weight", "norm.weight has the shape"):
        assert text in str(caught.value)
    with pytest.raises(CannotBegin, match="stock torch cannot read"):
        _begin(recipe, f"dcp:{tmp_path / 'nothing'}", InitPart.MODEL)


def test_another_models_checkpoint_is_refused_by_name(first: First) -> None:
    larger = _built(first, first.training.model.model_copy(update={"layers": 3}))
    with pytest.raises(CannotBegin, match=r"has no model\.blocks\.2"):
        _begin(larger, first.at_3.uri, InitPart.MODEL)
    wider = _built(first, first.training.model.model_copy(update={"dim": 128}))
    with pytest.raises(CannotBegin, match=r"embedding\.weight"):
        _begin(wider, first.at_3.uri, InitPart.MODEL)


# --- the exported file ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def logits(first: First, recipe: PretrainRecipe, tokens: torch.Tensor) -> torch.Tensor:
    _begin(recipe, first.at_3.uri, InitPart.EVERYTHING, step=3)
    with torch.no_grad():
        logits: torch.Tensor = recipe.model(tokens)
    return logits


def _export(first: First, path: Path) -> Path:
    plan = plan_export(first.at_3)
    with path.open("w+b") as file:
        write_export(open_storage(first.at_3.uri), plan, file)
    assert path.stat().st_size == plan.nbytes
    return path


def test_the_exported_file_gives_exactly_the_logits_of_the_run(
    first: First, tokens: torch.Tensor, logits: torch.Tensor, tmp_path: Path
) -> None:
    plain = Llama(first.training.model, 256)
    plain.reset_tables()
    plain.load_state_dict(load_file(_export(first, tmp_path / "model.safetensors")))
    with torch.no_grad():
        assert torch.equal(plain(tokens), logits)


def test_the_exported_folder_is_their_llama(
    first: First, tokens: torch.Tensor, logits: torch.Tensor, tmp_path: Path
) -> None:
    import json

    from tests.support.ranks.hugging_face_llama import forward

    folder, _ = export_folder(first.at_3, tmp_path / "folder.tar")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "3"
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_key_value_heads"], config["hidden_size"]) == (2, 64)
    theirs = forward(load_file(folder / "model.safetensors"), config, tokens)
    assert torch.allclose(theirs, logits, rtol=1e-4, atol=1e-5)
    assert logits.abs().max() > 0.1
