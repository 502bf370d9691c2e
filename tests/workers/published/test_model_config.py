"""Configurations as Hugging Face's library writes them now, and as older versions did."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.ranks.published_families import SIZES, built, with_random_weights

from holdfast_workers.published.model_config import FAMILIES, UnfitConfig, read_config
from holdfast_workers.spec import OF_PUBLISHED, ModelSpec, RopeScalingSpec

LENGTH = 12
WHOLE = f"a whole number from 1 to {2**53 - 1}"
ROTATIONS: list[Any] = [
    None,
    {},
    {"type": "default"},
    {"rope_type": "default", "rope_theta": 500.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "yarn", "factor": 4, "rope_theta": 300},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": None},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 4.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
]
SLIDING, FULL = "sliding_attention", "full_attention"
MISSING = object()
VALUES: dict[str, list[Any]] = {
    "rope_parameters": [MISSING, *ROTATIONS],
    "rope_scaling": [MISSING, MISSING, *ROTATIONS],
    "rope_theta": [MISSING, 300.0, 700, None],
    "original_max_position_embeddings": [MISSING, MISSING, 8, 16],
    "partial_rotary_factor": [MISSING, 1.0, 0.5],
    "num_key_value_heads": [1, 2, 4, None, MISSING],
    "head_dim": [MISSING, None, 8, 16],
    "rms_norm_eps": [1e-6, 1e-2],
    "tie_word_embeddings": [MISSING, True, False, None],
    "attention_bias": [MISSING, False, True],
    "mlp_bias": [MISSING, False, True],
    "hidden_act": [MISSING, "silu", "gelu"],
    "sliding_window": [MISSING, None, 4, 11, 12, 100],
    "use_sliding_window": [MISSING, False, True],
    "max_window_layers": [MISSING, 0, 1, 2, 28],
    "layer_types": [
        *(MISSING, MISSING, None, [FULL, FULL], [FULL, SLIDING], [SLIDING, SLIDING]),
        *([SLIDING, FULL], [FULL]),
    ],
    "is_causal": [MISSING, MISSING, True, False],
    "attention_dropout": [MISSING, 0.5],
    "pretraining_tp": [MISSING, 2],
    "pad_token_id": [MISSING, 0],
    "architectures": [MISSING, None, ["LlamaModel"]],
    "torch_dtype": [MISSING, "float32"],
}
"""Values of each key that changes a model, or that seems to."""
PLAIN = {**SIZES, "vocab_size": 40, "num_hidden_layers": 2}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly as a library writes it; some keys are otherwise."""
    family = draw(st.sampled_from(FAMILIES))
    document = {**PLAIN, "model_type": family, "rms_norm_eps": 1e-6, "head_dim": 16}
    for key in draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4)):
        value = draw(st.sampled_from(VALUES[key]))
        if value is MISSING:
            document.pop(key, None)
        else:
            document[key] = value
    return document


@settings(max_examples=300)
@given(documents())
def test_a_configuration_that_is_taken_gives_the_logits_of_transformers(
    document: dict[str, Any],
) -> None:
    try:
        read_config(document)
    except UnfitConfig:
        return
    found = with_random_weights(document, LENGTH)
    tokens = torch.randint(40, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = built(found)(tokens), found.theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
"""As version 4 wrote it."""
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_fields_of_a_configuration_of_version_4() -> None:
    found = read_config(LLAMA_3)
    scaling = RopeScalingSpec(type="llama3", factor=32.0)
    assert (found.family, found.positions) == ("llama", 131072)
    assert ModelSpec.model_validate(found.fields) == ModelSpec(
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_size=64,
        ffn_dim=8192,
        vocabulary=128256,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tied_embeddings=True,
    )


def test_the_fields_of_a_window_that_is_not_used() -> None:
    model = ModelSpec.model_validate(read_config(QWEN_2).fields)
    assert (model.sliding_window, model.window_from) == (None, 0)
    assert (model.width, model.qkv_bias, model.qk_norm) == (64, True, False)
    used = ModelSpec.model_validate(read_config({**QWEN_2, "use_sliding_window": True}).fields)
    assert (used.sliding_window, used.window_from) == (131072, 24)
    assert {used.window_of(block) for block in range(used.layers)} == {None}


def test_a_configuration_sets_every_field_that_the_user_may_not() -> None:
    for document in (LLAMA_3, QWEN_2):
        assert set(read_config(document).fields) == set(OF_PUBLISHED)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([LLAMA_3], "it is not an object of JSON"),
        (
            {},
            "model_type is None: the family llama is for llama, mistral, qwen2 and qwen3, "
            "and transformers for others",
        ),
        (
            {**LLAMA_3, "model_type": "gpt2"},
            "model_type is 'gpt2': the family llama is for llama, mistral, qwen2 and qwen3, "
            "and transformers for others",
        ),
        (
            {**LLAMA_3, "architectures": ["LlamaForSequenceClassification"]},
            "architectures is ['LlamaForSequenceClassification']: only a LlamaForCausalLM predicts "
            "the next token",
        ),
        (
            {**LLAMA_3, "auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "it names code of its own, which is never run",
        ),
        (
            {**QWEN_2, "quantization_config": {"quant_method": "gptq"}},
            "its weights are quantized: use the folder of the model that is not",
        ),
        (
            {**LLAMA_3, "hidden_act": "gelu"},
            "hidden_act is 'gelu', which the built-in model does not have",
        ),
        (
            {**LLAMA_3, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "its rope_type is 'yarn': the built-in model has linear and llama3",
        ),
        (
            {**LLAMA_3, "rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 32}},
            "its rope_type 'linear' has beta_fast, which the built-in model does not have",
        ),
        (
            {**LLAMA_3, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters differ: remove one of them",
        ),
        (
            {**LLAMA_3, "attention_bias": True},
            "attention_bias is true, for all four projections of attention: the built-in model has "
            "biases for queries, keys and values alone",
        ),
        (
            {**QWEN_2, "layer_types": ["sliding_attention"] * 24},
            "layer_types is not what its other keys say: only models whose last layers have the "
            "sliding window are supported",
        ),
        (
            {**QWEN_2, "vocab_size": "many"},
            f"vocab_size is 'many', and not {WHOLE}",
        ),
        ({**QWEN_2, "vocab_size": None}, f"vocab_size is null, and not {WHOLE}"),
        (
            {**QWEN_2, "num_hidden_layers": 10_001},
            "num_hidden_layers is 10001, and not a whole number from 1 to 10000",
        ),
        (
            {**QWEN_2, "max_position_embeddings": 2**53},
            f"max_position_embeddings is {2**53}, and not {WHOLE}",
        ),
        ({**QWEN_2, "rope_theta": 2**53}, f"rope_theta is {2**53}, and not {WHOLE}"),
        (
            {**QWEN_2, "rope_theta": 10**400},
            f"rope_theta is 1{'0' * 37}...{'0' * 39}, and not {WHOLE}",
        ),
        ({**QWEN_2, "rope_theta": math.inf}, "rope_theta is inf, and not a positive number"),
        (
            {**QWEN_2, "use_sliding_window": True, "max_window_layers": 10**19},
            f"max_window_layers is {10**19}, and not a whole number from 0 to {2**53 - 1}",
        ),
        ({**QWEN_2, "rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, and not a positive number"),
        ({key: QWEN_2[key] for key in QWEN_2 if key != "hidden_size"}, "hidden_size is missing"),
        ({**QWEN_2, "model_type": "qwen3", "architectures": None}, "head_dim is missing"),
    ],
)
def test_what_the_built_in_model_is_not_is_refused(document: object, message: str) -> None:
    with pytest.raises(UnfitConfig) as refused:
        read_config(document)
    assert str(refused.value) == message


LONG_VALUES: list[Any] = ["x" * 10**6, ["x" * 1000] * 1000, {"x" * 1000: 0}, 10**400]


@pytest.mark.parametrize("key", sorted({*LLAMA_3, "layer_types", "auto_map"}))
def test_a_value_of_any_length_is_refused_in_a_short_sentence(key: str) -> None:
    changes: list[dict[str, Any]] = [{key: value} for value in LONG_VALUES]
    for change in (*changes, *({"rope_scaling": each} for each in changes)):
        document = {**LLAMA_3, **change}
        try:
            read_config(document)
        except UnfitConfig as error:
            assert len(str(error)) < 200


def test_more_layers_than_a_list_can_name_take_no_memory() -> None:
    for layers in (3 * 10**8, 10**19):
        document = {**LLAMA_3, "num_hidden_layers": layers, "layer_types": ["full_attention"] * 2}
        tracemalloc.start()
        with pytest.raises(UnfitConfig, match=r"^num_hidden_layers is "):
            read_config(document)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1 << 20


NUMBERS = st.integers() | st.sampled_from([10**15, 10**19, 10**400, -(10**400)])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(st.sampled_from([LLAMA_3, QWEN_2]), st.data())
def test_a_damaged_configuration_is_refused_and_nothing_else_is_raised(
    document: dict[str, Any], data: st.DataObject
) -> None:
    keys = [*document, "rope_parameters", "head_dim", "layer_types", "sliding_window"]
    damaged = {**document, data.draw(st.sampled_from(keys)): data.draw(JSON)}
    try:
        found = read_config(damaged)
    except UnfitConfig:
        return
    ModelSpec.model_validate(found.fields)
