"""Models of the library transformers, trained as they are: in real gloo worlds, from folders that
the library has saved."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.checkpoint.model_checkpoint import ALONE as MESH_ALONE
from tests.support.checkpoint.model_checkpoint import export_folder
from tests.support.checkpoint.published_models import loaded, prepared_model
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.ranks import optimizer_programs as optimizers
from tests.support.ranks import published_programs
from tests.support.ranks import rank_programs as programs
from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.family_programs import Computed, computed
from tests.support.ranks.library_models import CASES, save_model
from tests.support.ranks.rank_worlds import ALONE, RecordingHooks, Worlds, tiny_spec
from tests.support.ranks.world_checks import (
    STOP,
    assert_one_curve,
    assert_rebinds,
    assert_replaced,
    digests_of,
    rows_of,
)

from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.data.token_corpus import IGNORED
from holdfast_workers.models.library_model import UnfitModel
from holdfast_workers.published.weight_set import BadWeightSet
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import (
    DataSpec,
    EvaluateSpec,
    ModelSpec,
    OptimizerSpec,
    SourceSpec,
    TrainingSpec,
    find_faults,
)
from holdfast_workers.spec.train import ValidationSpec
from holdfast_workers.training.evaluation import LOSS
from holdfast_workers.training.step_loop import train

WITHOUT_DROPOUT = ("gpt2, without dropout", "qwen2", "gemma2", "falcon", "mixtral", "deepseek_v3")
"""Cases for the quick tests: tied and not, two kinds of blocks, no table, experts, numbers that are
no parameters."""
MESHES: tuple[dict[str, Any], ...] = (
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2},
)
GPT2 = "gpt2"
EXPORTED = (GPT2, "gemma2", "mixtral", "deepseek_v3")
"""Cases for the quick tests of the export."""


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with small_corpus(tmp_path_factory.mktemp("corpus")):
        yield Worlds(tmp_path_factory.mktemp("cache"))


@cache
def model_of(folder: Path, case: str, dtype: str = "float32") -> tuple[Any, ModelSpec]:
    """The library's, and the section of a job that begins with it."""
    own = folder / f"{case}, {dtype}"
    theirs = save_model(own, case, dtype)
    spec = prepared_model(own, folder / f"{case}, {dtype}, store", family="transformers")
    return theirs, spec


def spec_of(
    folder: Path, case: str, mesh: Mapping[str, Any], steps: int = 6, **model: Any
) -> TrainingSpec:
    spec = tiny_spec(mesh, steps=steps)
    found = model_of(folder, case)[1].model_copy(update=model)
    return spec.model_copy(update={"model": found})


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({}, {}),
        ({"dp_shard": 2}, {}),
        slow({"dp_replicate": 2}, {}),
        ({"dp_shard": 2, "zero": 3}, {"activation_checkpointing": "selective"}),
        slow({"dp_shard": 2, "zero": 2}, {"activation_checkpointing": "full"}),
        slow({"dp_shard": 3}, {}),
        slow({"dp_replicate": 2, "dp_shard": 2}, {}),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_library(
    worlds: Worlds, folder: Path, mesh: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    specs = [spec_of(folder, case, mesh, **changes) for case in WITHOUT_DROPOUT]
    models = [model_of(folder, case)[0] for case in WITHOUT_DROPOUT]
    weights = [
        {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        for model in models
    ]
    ranks = worlds.run(computed, specs[0], list(zip(specs, weights, strict=True)))
    for model, of_ranks in zip(models, zip(*ranks, strict=True), strict=True):
        assert_step_of(model, of_ranks)


def assert_step_of(theirs: Any, ranks: tuple[Computed, ...]) -> None:
    theirs.zero_grad()
    counted = sum(int((each != IGNORED).sum()) for rank in ranks for each in rank.targets)
    assert counted == 8 * 32
    for rank in ranks:
        for inputs, targets, found in zip(rank.inputs, rank.targets, rank.logits, strict=True):
            logits = theirs(torch.from_numpy(inputs)).logits
            assert torch.allclose(torch.from_numpy(found), logits, rtol=0, atol=1e-5)
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                torch.from_numpy(targets).flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            torch.autograd.backward(loss / counted)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    covered = {name: np.zeros(each.shape, bool) for name, each in expected.items()}
    for rank in ranks:
        assert rank.gradients.keys() == expected.keys()
        for name, (box, gradient) in rank.gradients.items():
            piece, largest = expected[name][box], float(expected[name].abs().max())
            assert torch.allclose(torch.from_numpy(gradient), piece, rtol=0, atol=1e-5 * largest)
            covered[name][box] = True
    assert all(seen.all() for seen in covered.values())


@pytest.mark.usefixtures("worlds")
def test_the_dropout_of_the_configuration_is_applied_in_training_alone(
    folder: Path, tmp_path: Path
) -> None:
    tokens = torch.arange(32)[None]
    for case, differ in ((GPT2, True), ("gpt2, without dropout", False)):
        model = trained(folder, tmp_path, case, "float32", 0).model
        assert torch.equal(model(tokens), model(tokens)) is not differ
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("case", "mesh", "changes"),
    [
        (GPT2, {"dp_shard": 2}, {}),
        slow(GPT2, {"dp_replicate": 2}, {}),
        slow("phi", {"dp_shard": 2, "zero": 3}, {"activation_checkpointing": "full"}),
        slow("opt", {"dp_shard": 2}, {"dtype": "bfloat16"}),
        slow("mixtral", {"dp_shard": 2, "zero": 2}, {"dtype": "bfloat16"}),
        slow("gemma3_text", {"dp_replicate": 2, "dp_shard": 2}, {}),
        slow("mamba", {"dp_shard": 2}, {}),
        slow("deepseek_v3", {"dp_shard": 2}, {}),
    ],
    ids=str,
)
def test_a_rank_may_die(
    worlds: Worlds,
    folder: Path,
    tmp_path: Path,
    case: str,
    mesh: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> None:
    spec = spec_of(folder, case, mesh, **changes)
    expected = digests_of(worlds, spec)
    assert sorted(expected) == list(range(7))
    assert_replaced(worlds, spec, tmp_path, expected, programs.survivor, ("backward", STOP))
    assert_rebinds(worlds, spec, rebuild=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in (GPT2, "opt", "phi")])
def test_every_case_trains_alike_on_each_mesh(worlds: Worlds, folder: Path, case: str) -> None:
    alone = spec_of(folder, case, {})
    for mesh in MESHES:
        assert_one_curve(worlds, alone, spec_of(folder, case, mesh))
    losses = [row.loss for row in rows_of(worlds, alone)]
    assert losses[-1] < losses[0]


@pytest.mark.seconds
def test_each_rank_has_its_slices_of_the_folder(worlds: Worlds, folder: Path) -> None:
    spec = spec_of(folder, GPT2, {"dp_shard": 2}, steps=1)
    source = spec.model.source
    assert source is not None
    weights = {name: tensor.numpy() for name, tensor in loaded(Path(source)).items()}
    ranks = worlds.run(published_programs.began, spec)
    for rank in ranks:
        assert rank.pieces.keys() == weights.keys()
        for name, (box, values) in rank.pieces.items():
            assert np.array_equal(values, weights[name][box])
            assert values.size < weights[name].size


def trained(folder: Path, cache_dir: Path, case: str, dtype: str, steps: int) -> PretrainRecipe:
    spec = tiny_spec({}, steps=max(steps, 1))
    spec = spec.model_copy(update={"model": model_of(folder, case, dtype)[1]})
    recipe = programs.make(cache_dir, spec)
    recipe.build(ALONE)
    programs.begin(recipe)
    if steps:
        train(recipe, ALONE, spec, RecordingHooks(), 0)
    return recipe


def exported(recipe: PretrainRecipe, folder: Path, step: int, shard_bytes: int) -> Path:
    """The folder that the export of a checkpoint of this state is."""
    root, layout = open_storage(str(folder / "checkpoints")), recipe.layout()
    payload = bytearray(layout.payload_bytes)
    recipe.write_state(memoryview(payload), step)
    checkpoint = root.below(checkpoint_folder(step, 1))
    record = save_shard(checkpoint, memoryview(payload), layout, 0, 1, step)
    extra = {"training": recipe.spec.model_dump(mode="json")}
    manifest = finalize(checkpoint, [record], MESH_ALONE, extra)
    return export_folder(manifest, folder / "exported.tar", shard_bytes)[0]


@pytest.mark.usefixtures("worlds")
@pytest.mark.parametrize("case", [*EXPORTED, *map(slow, sorted(CASES.keys() - {*EXPORTED}))])
def test_transformers_loads_the_export_with_the_logits_of_the_trained_model(
    folder: Path, tmp_path: Path, case: str
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = trained(folder, tmp_path, case, "float32", 2)
    made = exported(recipe, tmp_path, 2, 20_000)
    assert len(list(made.glob("*.safetensors"))) > 1
    theirs, found = AutoModelForCausalLM.from_pretrained(
        made, local_files_only=True, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(64).view(2, 32) * 7 % 300
    with torch.no_grad():
        ours, expected = recipe.model.eval()(tokens), theirs.eval()(tokens).logits
    assert torch.allclose(ours, expected, rtol=0, atol=1e-5)
    before = model_of(folder, case)[0].eval()(tokens).logits
    assert not torch.allclose(ours, before, rtol=0, atol=1e-3)
    constants = recipe.model.constants()
    assert ("e_score_correction_bias" in "".join(constants)) is (case == "deepseek_v3")
    for name, value in constants.items():
        assert torch.equal(value, theirs.get_buffer(name)) and value.abs().max() > 0
        assert torch.equal(value, model_of(folder, case)[0].get_buffer(name))


@pytest.mark.usefixtures("worlds")
def test_a_model_that_was_not_trained_has_its_own_bytes_again(folder: Path, tmp_path: Path) -> None:
    recipe = trained(folder, tmp_path, "qwen2", "bfloat16", 0)
    made = exported(recipe, tmp_path, 0, 20_000)
    assert recipe.spec.model.source is not None
    source = Path(recipe.spec.model.source)
    before, after = loaded(source), loaded(made)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config, there = (json.loads((each / "config.json").read_text()) for each in (source, made))
    # The tokens are bytes here, and have no special ones.
    changed = {"dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert there["torch_dtype"] == config["dtype"] == "bfloat16"
    assert {*config} - changed and all(there[key] == config[key] for key in {*config} - changed)


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["muon", slow("adafactor"), slow("lamb")])
def test_optimizers_groups_and_averages_work_as_with_built_in_models(
    worlds: Worlds, folder: Path, name: str
) -> None:
    groups = [{"match": "*.ln_?.*", "lr_scale": 0.5}]
    optimizer = OptimizerSpec.model_validate({"name": name, "lr": 1e-2, "groups": groups})

    def of(mesh: Mapping[str, Any]) -> TrainingSpec:
        spec = spec_of(folder, "gpt2, without dropout", mesh)
        return optimizers.with_optimizer(spec, optimizer, ema=0.9)

    alone, together = rows_of(worlds, of({})), rows_of(worlds, of({"dp_shard": 2}))
    # Muon rounds its updates to bfloat16.
    error = 1e-3 if name == "muon" else 1e-5
    losses = [row.loss for row in alone]
    assert [row.loss for row in together] == pytest.approx(losses, rel=error)
    assert len(set(losses)) == 6


@pytest.mark.usefixtures("worlds")
def test_muon_takes_the_matrices_of_the_blocks(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, GPT2, {})
    spec = optimizers.with_optimizer(spec, OptimizerSpec.model_validate({"name": "muon"}))
    recipe = programs.make(tmp_path, spec)
    recipe.build(ALONE)
    kinds = {each.parameter.name: each.kind for each in recipe._require_built().optimizer.moments}
    chosen = {name for name, kind in kinds.items() if kind == "momentum_buffer"}
    assert len(chosen) == 8 and "transformer.h.1.mlp.c_proj.weight" in chosen
    assert "transformer.wte.weight" in kinds.keys() - chosen


@pytest.mark.usefixtures("worlds")
def test_a_group_without_a_parameter_is_refused(folder: Path, tmp_path: Path) -> None:
    optimizer = OptimizerSpec.model_validate({"groups": [{"match": "blocks.*"}]})
    spec = optimizers.with_optimizer(spec_of(folder, GPT2, {}), optimizer)
    with pytest.raises(UnfitModel, match=r"^no parameter belongs to the group 'blocks\.\*'"):
        PretrainRecipe(spec, tmp_path).prepare()


@pytest.mark.seconds
def test_it_is_evaluated_without_dropout_on_any_mesh(folder: Path, worlds: Worlds) -> None:
    web = MadeSet("web", random_shards(1, [275, 140, 134, 12]))
    held = MadeSet("held", random_shards(2, [150, 9, 170, 3]))
    for made in (web, held):
        made.put_into_cache(worlds._cache_dir)
    data = DataSpec(
        sources=(SourceSpec(path="/web"),),
        prepared=(web.prepared(),),
        validation=ValidationSpec(path="/held", prepared=held.prepared()),
    )
    found = []
    for mesh in ({}, {"dp_shard": 2}):
        spec = spec_of(folder, GPT2, mesh, steps=1)
        spec = spec.model_copy(update={"data": data, "evaluate": EvaluateSpec(every_steps=1)})
        (row,) = rows_of(worlds, spec)
        found.append(row.own[LOSS])
    # Dropout differs between the meshes, so their weights do by one small step.
    assert found[0] == pytest.approx(found[1], rel=1e-2)


@pytest.mark.usefixtures("worlds")
def test_a_rank_without_the_library_names_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(folder, GPT2, {})
    monkeypatch.setitem(sys.modules, "transformers", None)  # its import fails
    with pytest.raises(UnfitModel, match=r"pip install 'holdfast-train\[transformers\]' on each"):
        PretrainRecipe(spec, tmp_path).prepare()


@pytest.mark.usefixtures("worlds")
def test_another_configuration_than_the_folders_is_refused(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, GPT2, {})
    published = spec.model.published
    assert published is not None and published.config is not None
    config = {**published.config, "layer_norm_epsilon": 1e-3}
    published = published.model_copy(update={"config": config})
    model = spec.model.model_copy(update={"published": published})
    recipe = programs.make(tmp_path, spec.model_copy(update={"model": model}))
    recipe.build(ALONE)
    with pytest.raises(BadWeightSet, match=r"^model\.published\.config is not the config\.json of"):
        programs.begin(recipe)


@pytest.mark.usefixtures("worlds")
@pytest.mark.parametrize(
    ("section", "change", "path"),
    [
        ("parallel", {"tp": 2}, "parallel.tp"),
        ("parallel", {"pp": 2}, "parallel.pp"),
        ("parallel", {"cp": 2}, "parallel.cp"),
        ("parallel", {"vocabulary_parallel": True}, "parallel.vocabulary_parallel"),
        ("parallel", {"sequence_parallel": True}, "parallel.sequence_parallel"),
        ("model", {"compile": True}, "model.compile"),
        ("model", {"dropout": 0.1}, "model.dropout"),
        ("model", {"sequence_length": 65}, "model.sequence_length"),
        ("model", {"image_size": 8}, "model.image_size"),
        ("model", {"source": None, "published": None, "vocabulary": None}, "model.from"),
    ],
    ids=str,
)
def test_what_the_family_lacks_is_refused_by_name(
    folder: Path, section: str, change: dict[str, Any], path: str
) -> None:
    data = DataSpec(sources=(SourceSpec(path="/web"),), tokenizer="/tokenizer.json")
    spec = spec_of(folder, GPT2, {}).model_copy(update={"data": data})
    assert find_faults(spec) == []
    changed = getattr(spec, section).model_copy(update=change)
    faults = find_faults(spec.model_copy(update={section: changed}))
    assert path in {fault.path for fault in faults}
