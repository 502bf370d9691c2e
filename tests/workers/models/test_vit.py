"""The Vision Transformer's arithmetic agrees with its definition; it knows nothing of ranks."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast_workers.models import vit
from holdfast_workers.models.transformer import initial_values
from holdfast_workers.models.vit import VisionTransformer, patches
from holdfast_workers.models.vit_parameters import head_in_blocks, vit_shapes
from holdfast_workers.spec import ModelSpec

SPEC = ModelSpec(family="vit", dim=32, layers=2, heads=4, image_size=12, patch_size=4, classes=5)


def filled(spec: ModelSpec = SPEC) -> VisionTransformer:
    model = VisionTransformer(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_values(name, tuple(parameter.shape), spec.layers, 3))
    return model


def images(batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch, 12, 12, 3), dtype=torch.uint8, generator=generator)


def by_definition(weights: dict[str, Tensor], spec: ModelSpec, pictures: Tensor) -> Tensor:
    """Logits from the model's definition, image by image and head by head."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return weight * centred / (variance + spec.norm_eps).sqrt()

    size, side = spec.images.patch_size, spec.images.image_size // spec.images.patch_size
    logits = []
    for picture in pictures.float() / 127.5 - 1:
        cut = [
            picture[row * size : (row + 1) * size, column * size : (column + 1) * size].flatten()
            for row in range(side)
            for column in range(side)
        ]
        x = torch.stack(cut) @ weights["embedding.weight"].T + weights["embedding.positions"]
        for layer in range(spec.layers):
            prefix = f"blocks.{layer}."
            part = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            inputs = normed(x, part["attention_norm.weight"])
            width, mixed = spec.dim // spec.heads, []
            for head in range(spec.heads):
                rows = slice(head * width, (head + 1) * width)
                query, key, value = (
                    inputs @ part[f"attention.{name}.weight"][rows].T
                    for name in ("query", "key", "value")
                )
                mixed.append(torch.softmax(query @ key.T / math.sqrt(width), -1) @ value)
            x = x + torch.cat(mixed, -1) @ part["attention.output.weight"].T
            inputs = normed(x, part["feed_forward_norm.weight"])
            hidden = inputs @ part["feed_forward.up.weight"].T
            active = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            x = x + active @ part["feed_forward.down.weight"].T
        logits.append(normed(x, weights["norm.weight"]).mean(0) @ weights["head.weight"].T)
    return torch.stack(logits)


@pytest.mark.parametrize("changes", [{}, {"ffn_dim": 48, "heads": 1, "patch_size": 6}])
def test_it_is_the_model_of_its_definition(changes: dict[str, int]) -> None:
    spec = SPEC.model_copy(update=changes)
    model = filled(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that attention differs between patches
        expected = by_definition(dict(model.named_parameters()), spec, images())
        found = model(images())
    assert found.shape == (3, 5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_patch_sees_every_other_and_its_own_position() -> None:
    model, picture = filled(), images(1)
    with torch.no_grad():
        model.get_parameter("embedding.positions").mul_(50)
        before = model(picture)
        moved = model(picture.roll(4, dims=1))
    assert not torch.allclose(before, moved)
    inputs = torch.randn(1, 9, 32, requires_grad=True)
    model.blocks["0"](inputs)[0, 0].sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad.abs().sum(-1) > 0).all()


def test_patches_are_cut_row_by_row() -> None:
    picture = torch.arange(4 * 4 * 3).view(1, 4, 4, 3)
    cut = patches(picture, 2)
    assert cut.shape == (1, 4, 12)
    assert cut[0, 1].tolist() == picture[0, :2, 2:].flatten().tolist()
    assert cut[0, 2].tolist() == picture[0, 2:, :2].flatten().tolist()


def test_shapes_are_known_without_a_model() -> None:
    for changes in ({}, {"ffn_dim": 48, "image_size": 16}, {"classes": 7, "layers": 3}):
        spec = SPEC.model_copy(update=changes)
        parameters = VisionTransformer(spec).named_parameters()
        assert vit_shapes(spec) == {name: tuple(value.shape) for name, value in parameters}
    assert 0 < head_in_blocks(SPEC) < 0.01


def test_it_has_no_parallel_code() -> None:
    for file in (vit.__file__, Path(vit.__file__).with_name("transformer.py")):
        tree = ast.parse(Path(file).read_text())
        imported = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        }
        assert not [name for name in imported if name and ("dist" in name or "parallel" in name)]
