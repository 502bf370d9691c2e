"""A job begins with exactly the weights of a published folder, on any mesh, and trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoint.published_models import loaded, prepared_model
from tests.support.ranks import published_programs as programs
from tests.support.ranks.corpora import small_corpus
from tests.support.ranks.minimal_recipe import MinimalRecipe
from tests.support.ranks.rank_worlds import ALONE, Worlds, start_from_seed, tiny_spec

from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.published.weight_files import UnfitWeights
from holdfast_workers.published.weight_set import MANIFEST, BadWeightSet
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import ModelSpec, TrainingSpec
from holdfast_workers.worker.first_weights import initialize_with_weights

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = ("llama", "qwen2")


@dataclass(frozen=True)
class Published:
    """A folder that transformers has saved in bfloat16."""

    theirs: Any
    """The model as transformers loads it, in float32."""
    spec: ModelSpec
    weights: dict[str, Any]
    """All parameters by our names, as float32."""
    cache: Path

    def training(self, mesh: Mapping[str, Any], **changes: Any) -> TrainingSpec:
        spec = tiny_spec(mesh, steps=2)
        return spec.model_copy(update={"model": self.spec.model_copy(update=changes)})

    def manifest(self) -> bytes:
        assert self.spec.published is not None
        return Path(self.spec.published.uri, MANIFEST).read_bytes()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with small_corpus(tmp_path_factory.mktemp("corpus")):
        yield Worlds(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", params=FAMILIES)
def published(
    request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    import transformers

    folder, family = tmp_path_factory.mktemp("published"), request.param
    torch.manual_seed(4)
    if family == "llama":
        config: Any = transformers.LlamaConfig(**SIZES)
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(torch.randn(parameter.shape) / 8)
    model.to(torch.bfloat16).save_pretrained(folder / "model", max_shard_size="20KB")
    theirs = type(model).from_pretrained(folder / "model", dtype=torch.float32)
    spec = prepared_model(folder / "model", folder / "store")
    tensors = loaded(folder / "model")
    names = [name for name, _ in _built(spec, folder).model.named_parameters()]
    weights = {name: tensors[hugging_face_name(name)].float().numpy() for name in names}
    assert len(weights) == len(tensors) > 20
    return Published(theirs.eval(), spec, weights, folder / "cache")


def _built(model: ModelSpec, cache: Path) -> PretrainRecipe:
    recipe = PretrainRecipe(tiny_spec({}, steps=2).model_copy(update={"model": model}), cache)
    recipe.prepare()
    recipe.build(ALONE)
    return recipe


@pytest.mark.parametrize(
    ("published", "mesh"),
    [
        pytest.param(family, mesh, marks=[] if family in own else [pytest.mark.slow])
        for own, mesh in (
            ((), {"dp_replicate": 2}),
            (("llama",), {}),
            (("qwen2",), {"dp_shard": 3}),
            (FAMILIES, {"dp_shard": 2, "tp": 2}),
            (("qwen2",), {"pp": 2, "dp_shard": 2}),
            (("llama",), {"cp": 2, "zero": 3}),
        )
        for family in FAMILIES
    ],
    ids=str,
    indirect=["published"],
)
def test_each_rank_has_its_slices_of_the_folder_and_trains(
    worlds: Worlds, published: Published, mesh: Mapping[str, Any]
) -> None:
    ranks: list[programs.Began] = worlds.run(programs.began, published.training(mesh))
    for rank in ranks:
        for name, (slices, values) in rank.pieces.items():
            assert np.array_equal(values, published.weights[name][slices]), name
    assert {name for rank in ranks for name in rank.pieces} == set(published.weights)
    (alone,) = worlds.once(programs.began, published.training({}))
    assert ranks[0].losses == pytest.approx(alone.losses, rel=1e-5)
    assert ranks[0].losses[1] < ranks[0].losses[0]


def test_its_logits_are_those_of_the_published_model(published: Published) -> None:
    recipe = _built(published.spec, published.cache)
    initialize_with_weights(recipe, published.manifest)
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = recipe.model.eval()(tokens), published.theirs(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert theirs.abs().max() > 0.1


def test_the_folder_is_read_in_few_pieces_and_may_be_left(published: Published) -> None:
    class Over(Exception):
        pass

    def leave() -> None:
        reads.append(1)
        if len(reads) == 10:
            raise Over

    reads: list[int] = []
    recipe = _built(published.spec, published.cache)
    with pytest.raises(Over):
        initialize_with_weights(recipe, published.manifest, leave)
    assert recipe.published_weights is None


def test_without_the_weights_nothing_is_trained_in_silence(published: Published) -> None:
    """As before a checkpoint is loaded, which has all of them."""
    recipe = _built(published.spec, published.cache)
    start_from_seed(recipe)
    assert all(local.isnan().all() for local in recipe.local_tensors("parameter").values())


def test_a_model_that_is_not_that_of_the_folder_is_refused_by_its_field(
    published: Published,
) -> None:
    for name, value in (("norm_eps", 1e-3), ("rope_theta", 1e6)):
        recipe = _built(published.spec.model_copy(update={name: value}), published.cache)
        with pytest.raises(BadWeightSet, match=rf"^model\.{name} is {value}, and .* in the config"):
            initialize_with_weights(recipe, published.manifest)
    assert recipe.applied_step == -1


def test_a_damaged_manifest_is_refused(published: Published) -> None:
    recipe = _built(published.spec, published.cache)
    content = bytearray(published.manifest())
    content[-20] ^= 1
    with pytest.raises(BadWeightSet, match=r"store/manifest\.json is damaged"):
        initialize_with_weights(recipe, lambda: bytes(content))


def test_a_recipe_that_takes_no_weights_is_refused(published: Published) -> None:
    recipe = MinimalRecipe(published.training({}), published.cache)
    with pytest.raises(BadWeightSet, match="the recipe pretrain takes no published weights"):
        initialize_with_weights(recipe, published.manifest)


def test_a_recipe_of_a_user_may_change_what_it_begins_with(published: Published) -> None:
    class Halved(PretrainRecipe):
        def initialize(self) -> None:
            super().initialize()
            for tensor in self.local_tensors("parameter").values():
                tensor.div_(2)

    recipe = Halved(published.training({}), published.cache)
    recipe.prepare()
    recipe.build(ALONE)
    initialize_with_weights(recipe, published.manifest)
    for name, values in recipe.local_tensors("parameter").items():
        assert np.array_equal(values.numpy(), published.weights[name] / 2), name


def test_a_spec_that_no_server_has_prepared_is_refused(published: Published) -> None:
    unprepared = ModelSpec.model_validate({"from": published.spec.source})
    recipe = PretrainRecipe(tiny_spec({}).model_copy(update={"model": unprepared}), published.cache)
    with pytest.raises(UnfitWeights, match=r"^model\.from is not prepared: the server does so"):
        recipe.prepare()
