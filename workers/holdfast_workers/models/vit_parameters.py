"""The Vision Transformer's parameters by name, with their shapes. Pure, no torch."""

from __future__ import annotations

from math import prod

from holdfast_workers.spec import ModelSpec


def hidden_size(model: ModelSpec) -> int:
    """Hidden size of the feed-forward layer."""
    return model.ffn_dim or 4 * model.dim


def head_in_blocks(model: ModelSpec) -> float:
    """The multiplications of the head for an image, as a fraction of those of a block."""
    shapes = vit_shapes(model.model_copy(update={"layers": 1}))
    block = sum(prod(shape) for name, shape in shapes.items() if name.startswith("blocks."))
    attention = 2 * model.dim * model.positions  # scores and mixing
    return prod(shapes["head.weight"]) / (model.positions * (block + attention))


def vit_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter, by name."""
    dim, hidden, images = model.dim, hidden_size(model), model.images
    in_block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (dim,),
        "attention.query.weight": (dim, dim),
        "attention.key.weight": (dim, dim),
        "attention.value.weight": (dim, dim),
        "attention.output.weight": (dim, dim),
        "feed_forward_norm.weight": (dim,),
        "feed_forward.up.weight": (hidden, dim),
        "feed_forward.down.weight": (dim, hidden),
    }
    return {
        "embedding.weight": (dim, images.patch_values),
        "embedding.positions": (model.positions, dim),
        **{
            f"blocks.{index}.{name}": shape
            for index in range(model.layers)
            for name, shape in in_block.items()
        },
        "norm.weight": (dim,),
        "head.weight": (images.classes, dim),
    }
