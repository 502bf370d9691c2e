"""The model's own arithmetic agrees with torch's plain operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import hugging_face_llama
from tests.support.ranks.rank_worlds import FLAGS

from holdfast_workers.models.llama import Llama, RMSNorm, rotate, scaled_frequencies
from holdfast_workers.models.llama_parameters import (
    hugging_face_config,
    hugging_face_name,
    parameter_shapes,
)
from holdfast_workers.models.transformer import initial_values
from holdfast_workers.spec import ModelSpec, RopeScalingSpec

SPEC = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, sequence_length=16)
LINEAR = RopeScalingSpec(type="linear", factor=4.0)
LLAMA3 = RopeScalingSpec(type="llama3", factor=8.0, original_sequence_length=64)


def filled(spec: ModelSpec = SPEC) -> Llama:
    model = Llama(spec, 50)
    model.reset_tables()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_values(name, tuple(parameter.shape), spec.layers, 3))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3])
def test_it_is_the_llama_of_hugging_face(tied: bool, scaling: RopeScalingSpec | None) -> None:
    spec = SPEC.model_copy(
        update={"tied_embeddings": tied, "rope_scaling": scaling, "sequence_length": 128}
    )
    model, tokens = filled(spec), torch.arange(128).unsqueeze(0) % 50
    weights = {hugging_face_name(name): value.detach() for name, value in model.named_parameters()}
    with torch.no_grad():
        for value in weights.values():
            value.mul_(3.0)  # so that positions matter
        theirs = hugging_face_llama.forward(weights, hugging_face_config(spec, 50, {}), tokens)
        torch.testing.assert_close(model(tokens), theirs, rtol=1e-4, atol=1e-4)


def test_scaled_frequencies_differ_where_they_should() -> None:
    frequencies = 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    waves = 64 * frequencies / (2 * torch.pi)  # in the original length
    assert torch.equal(scaled_frequencies(frequencies, LINEAR), frequencies / 4)
    scaled = scaled_frequencies(frequencies, LLAMA3)
    assert torch.equal(scaled[waves > 4], frequencies[waves > 4])
    assert torch.equal(scaled[waves < 1], frequencies[waves < 1] / 8)
    between = (waves > 1) & (waves < 4)
    assert between.any()
    assert (scaled[between] < frequencies[between]).all()
    assert (scaled[between] > frequencies[between] / 8).all()
    assert (scaled.diff() < 0).all()


def test_the_norm_and_its_gradients_equal_torchs() -> None:
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    norm = RMSNorm(16, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    results = []
    for forward in (norm, lambda t: F.rms_norm(t, (16,), norm.weight, 1e-5)):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        y = forward(leaf)
        y.backward(upstream)
        assert norm.weight.grad is not None
        results.append((y.detach(), leaf.grad, norm.weight.grad.clone()))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)


def test_rotation_preserves_norms_and_depends_only_on_distance() -> None:
    model = filled()
    cos, sin = model.get_buffer("cos"), model.get_buffer("sin")
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    x = rotate(query.expand(1, 1, 16, 8), cos, sin)[0, 0]
    y = rotate(key.expand(1, 1, 16, 8), cos, sin)[0, 0]
    torch.testing.assert_close(x.norm(dim=-1), query.norm().expand(16))
    products = x @ y.T
    for distance in (0, 1, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_no_position_sees_a_later_one() -> None:
    model = filled()
    tokens = torch.arange(16).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 10] = 49
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_initial_values_depend_only_on_seed_and_name() -> None:
    def values(seed: int, name: str) -> torch.Tensor:
        return initial_values(name, (8, 4), 2, seed)

    first = values(1, "a.weight")
    torch.manual_seed(99)
    assert torch.equal(first, values(1, "a.weight"))
    assert not torch.equal(first, values(2, "a.weight"))
    assert not torch.equal(first, values(1, "b.weight"))
    assert torch.equal(initial_values("norm.weight", (4,), 2, 1), torch.ones(4))
    assert torch.equal(initial_values("query.bias", (4,), 2, 1), torch.zeros(4))


def test_parameter_shapes_are_known_without_a_model() -> None:
    for changes in ({}, {"ffn_dim": 48, "kv_heads": None}, {"tied_embeddings": True}, FLAGS):
        changed = SPEC.model_copy(update=changes)
        parameters = Llama(changed, 50).named_parameters()
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        assert parameter_shapes(changed, 50) == shapes
