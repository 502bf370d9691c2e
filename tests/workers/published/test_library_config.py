"""A folder of the family transformers is tried before it is trained, and taken as it is or refused
in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint.published_models import loaded, write_folder
from tests.support.ranks.library_models import CASES, SIZES, save_model
from torch import Tensor

from holdfast_workers.models.library_model import UnfitModel, new_library_model
from holdfast_workers.models.library_trial import try_model
from holdfast_workers.published.folder import read_folder
from holdfast_workers.published.model_config import UnfitConfig
from holdfast_workers.published.weight_files import UnfitWeights
from holdfast_workers.spec.model import ComputeDtype

WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def document(case: str, **changes: Any) -> dict[str, Any]:
    kind, settings = CASES[case]
    return {"model_type": kind, **SIZES, **settings, **changes}


def parameters_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights, by the library's names."""
    random = torch.Generator().manual_seed(3)
    model = new_library_model(config)
    weights = {**dict(model.named_parameters()), **model.constants()}
    shapes = {name: each.shape for name, each in weights.items()}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_each_case_can_be_trained(tmp_path: Path, case: str, dtype: ComputeDtype) -> None:
    config = document(case)
    write_folder(tmp_path, config, parameters_of(config), parts=3)
    found = read_folder(tmp_path, "transformers", dtype)
    assert (found.config.family, found.config.fields) == (config["model_type"], {"vocabulary": 300})
    assert found.config.positions == 64
    assert found.dtype == "float32" and len(found.files) == 3


def test_a_model_without_positions_has_no_longest_sequence(tmp_path: Path) -> None:
    config = document("bloom")
    del config["max_position_embeddings"]
    write_folder(tmp_path, config, parameters_of(config))
    assert read_folder(tmp_path, "transformers").config.positions is None


@pytest.mark.parametrize("is_tagged", [True, False])
def test_numbers_that_json_lacks_are_read_and_kept_as_the_library_writes_them(
    tmp_path: Path, is_tagged: bool
) -> None:
    tag = {"__float__": "Infinity"}
    config = {"model_type": "mamba2", **SIZES, "num_heads": 8, "head_dim": 8, "state_size": 8}
    config |= {"n_groups": 1, "chunk_size": 8, "time_step_limit": [0.0, tag]}
    write_folder(tmp_path, config, parameters_of(config))
    if not is_tagged:
        file = tmp_path / "config.json"
        file.write_text(file.read_text().replace(json.dumps(tag), "Infinity"))
    kept = dict(read_folder(tmp_path, "transformers").document)
    assert kept == config
    model: Any = new_library_model(kept)
    assert model.config.time_step_limit == [0.0, float("inf")]


def test_a_number_beyond_every_float_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, config := document("gpt2", notes=[7.5]), parameters_of(config))
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("7.5", "1e999"))
    with pytest.raises(UnfitConfig, match="it has a number that is too large for a float"):
        read_folder(tmp_path, "transformers")


def test_tables_have_the_values_of_the_library() -> None:
    import transformers

    config = document("gemma3_text")
    model = new_library_model(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(-1)
    model.reset_tables()
    of_config: Any = transformers.CONFIG_MAPPING[config["model_type"]]
    theirs: Any = transformers.AutoModelForCausalLM.from_config(of_config.from_dict(config))
    expected = dict(theirs.named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys() and len(expected) > 2
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_model_of_any_size_is_tried_without_memory_for_it() -> None:
    model = new_library_model(document("qwen2", vocab_size=10**12, hidden_size=4096))
    assert try_model(model, torch.bfloat16, 64) == 10**12


def test_a_shared_weight_stays_shared_in_memory() -> None:
    model = new_library_model(document("gpt2")).to_empty(device="cpu")
    assert model.get_parameter(WTE) is model.get_parameter(HEAD)
    assert HEAD not in dict(model.named_parameters())


def test_names_that_the_library_takes_for_its_own_are_taken(tmp_path: Path) -> None:
    """As in folders of models without a head, and of models whose head is the embedding."""
    config = document("gpt2")
    tensors = parameters_of(config)
    short = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    short |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), HEAD: short["wte.weight"].clone()}
    write_folder(tmp_path / "short", config, short, parts=2)
    found = read_folder(tmp_path / "short", "transformers")
    assert {name: each.shape for name, each in found.tensors.items()} == {
        name: tuple(each.shape) for name, each in tensors.items()
    }
    del tensors[WTE]
    write_folder(tmp_path / "head", config, {**tensors, HEAD: short[HEAD]})
    assert WTE in read_folder(tmp_path / "head", "transformers").tensors
    short[HEAD][0, 0] += 1
    write_folder(tmp_path / "short", config, short, parts=2)
    with pytest.raises(UnfitWeights, match=r"lm_head\.weight is not equal to "):
        read_folder(tmp_path / "short", "transformers")


def test_weights_that_the_library_converts_are_refused_with_a_remedy_that_works(
    tmp_path: Path,
) -> None:
    model = save_model(tmp_path / "own", "mixtral")
    model.save_pretrained(tmp_path / "published")
    assert loaded(tmp_path / "own").keys() != loaded(tmp_path / "published").keys()
    with pytest.raises(UnfitWeights) as refused:
        read_folder(tmp_path / "published", "transformers")
    assert "lacks model.layers.0.mlp.experts.down_proj, " in str(refused.value)
    assert str(refused.value).endswith(
        "save it anew with save_pretrained(folder, save_original_format=False)"
    )
    assert read_folder(tmp_path / "own", "transformers").tensors.keys() == {
        name for name, _ in model.named_parameters()
    }


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    config = document("gpt2")
    write_folder(tmp_path, config, parameters_of(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnfitWeights, match="a pickle, which runs code"):
        read_folder(tmp_path, "transformers")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "it is not an object of JSON"),
        ({"model_type": "no-such"}, r"transformers [\d.]+ has no model_type 'no-such'"),
        ({"model_type": ["x"]}, r"transformers [\d.]+ has no model_type "),
        (document("gpt2", auto_map={"AutoModel": "code.py"}), "it names code of its own, which is"),
        (document("gpt2", quantization_config={"bits": 4}), "its weights are quantized"),
        (document("mixtral", output_router_logits=True), "output_router_logits adds the routers'"),
        (document("gpt2", is_encoder_decoder=True), "it has an encoder, too"),
        (document("gpt2", notes="x" * 70_000), "it is larger than 65536 bytes"),
        (
            document("gpt2", num_attention_heads=5),
            r"transformers [\d.]+ cannot build it: ValueError: ",
        ),
        (
            document("gpt2", architectures=["GPT2ForSequenceClassification"]),
            r"architectures is \['GPT2ForSequenceClassification'\]: only a GPT2LMHeadModel ",
        ),
        ({"model_type": "t5", **SIZES}, r"transformers [\d.]+ cannot build it: "),
        ({"model_type": "bert", **SIZES, "intermediate_size": 48}, "two of its blocks share"),
        (
            {"model_type": "ernie", **SIZES, "intermediate_size": 48},
            r"ernie\.encoder\.layer\.0\.attention\.self attends to later tokens, too",
        ),
        ({"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4}, "the library names no"),
        (
            {"model_type": "bart", **SIZES, "is_decoder": True, "is_encoder_decoder": False},
            "attends to later tokens, too: it does not predict the next",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    tmp_path: Path, config: Any, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnfitConfig, match=message) as refused:
        read_folder(tmp_path, "transformers")
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_code_of_a_hub_is_never_asked_for() -> None:
    """Also if the configuration names it as the way to compute attention."""
    named = {"attn_implementation": "someone/kernels", "_attn_implementation": "someone/kernels"}
    model: Any = new_library_model(document("qwen2", **named))
    assert model.config._attn_implementation == "sdpa"


def frozen(model: Any) -> None:
    model.get_parameter(WTE).requires_grad_(False)


def scalar(model: Any) -> None:
    model.transformer.scale = torch.nn.Parameter(torch.ones(()))


def counted(model: Any) -> None:
    model.transformer.register_buffer("count", torch.zeros(1, dtype=torch.int64))


def unused(model: Any) -> None:
    model.transformer.extra = torch.nn.Linear(3, 3)


def shared(model: Any) -> None:
    first, second = model.blocks.values()
    model.ties.append([(first.ln_1, "weight"), (second.ln_1, "weight")])


def twice(model: Any) -> None:
    first, _ = model.transformer.h
    model.transformer.h[1] = first
    model.blocks = {"transformer.h.0": first}


def counting(model: Any) -> None:
    def count(*_: Any) -> None:
        model.transformer.seen.add_(1)

    model.transformer.register_buffer("seen", torch.zeros(1), persistent=False)
    model.transformer.ln_f.register_forward_hook(count)


def without_value(model: Any) -> None:
    model.register_buffer("lost", torch.zeros(1, device="meta"), persistent=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (frozen, r"^its parameter transformer\.wte\.weight is not trained"),
        (scalar, r"^its parameter transformer\.scale is float32 without a dimension"),
        (counted, r"^its buffer transformer\.count is saved with its weights, and is int64"),
        (unused, r"^transformer\.extra\.weight and 1 more parameters: the loss of the next token"),
        (shared, "^two of its blocks share the parameter weight"),
        (twice, r"^a step uses its block transformer\.h\.0 2 times, and not once"),
        (counting, r"^a step changes its buffer transformer\.seen, which is no parameter"),
        (without_value, "^its buffer lost has no value without the weights"),
    ],
)
def test_a_trial_finds_what_would_be_trained_wrongly(
    spoil: Callable[[Any], None], message: str
) -> None:
    model = new_library_model(document("gpt2"))
    spoil(model)
    with pytest.raises(UnfitModel, match=message):
        try_model(model, torch.float32, 64)
