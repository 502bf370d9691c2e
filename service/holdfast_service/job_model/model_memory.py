"""The parameters of a job's model with their sizes, and the limits of its meshes, from its spec. No
torch.

Only the built-in models are known; of a user's function or recipe no memory is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from holdfast_service.placement.mesh_choice import MeshLimits
from holdfast_service.placement.mesh_memory import MemoryModel
from holdfast_workers.models.llama_parameters import default_ffn_dim, parameter_shapes
from holdfast_workers.models.vit_parameters import hidden_size, vit_shapes
from holdfast_workers.spec import (
    BUILT_IN_RECIPES,
    BYTE_VOCABULARY,
    ActivationCheckpointing,
    Family,
    ModelSpec,
    OptimizerName,
    ParallelSpec,
    SpecFault,
    TrainingSpec,
    TrainSpec,
)

SMALL_MODEL_BYTES = 64 << 20
"""Size up to which all parameters are gathered at once; the same as in `parallelize/shard.py`,
which imports torch."""


@dataclass(frozen=True)
class _Kept:
    """Elements that a block keeps for the backward pass, per token: whole ones, in units of `dim`,
    and divided ones, in units of the width of all heads and of the feed-forward's width. Keys and
    values are repeated to as many heads as there are queries."""

    whole: int
    of_attention: int
    of_feed_forward: int
    of_head_norms: int = 0
    """With norms of queries and keys; in units of the width of both."""

    def counted(self, model: ModelSpec) -> tuple[int, int]:
        """The numbers of elements that are whole and that are divided."""
        is_vit = model.family == "vit"
        hidden = hidden_size(model) if is_vit else model.ffn_dim or default_ffn_dim(model.dim)
        divided = self.of_attention * _width(model) + self.of_feed_forward * hidden
        if model.qk_norm:
            heads = model.heads + (model.kv_heads or model.heads)
            divided += self.of_head_norms * heads * model.width
        return self.whole * model.dim, divided


_KEPT: dict[Family, dict[ActivationCheckpointing, _Kept]] = {
    "llama": {
        # Inputs and outputs of two norms; queries, keys, values and the output of attention, with
        # its copy by tokens; gate, its activation, up, product.
        "none": _Kept(4, 5, 4, 1),
        # The block's input, and the results of matrix products and of attention.
        "selective": _Kept(3, 4, 2),
        "full": _Kept(1, 0, 0),
    },
    "vit": {  # The same; of the feed-forward layer up and its activation.
        "none": _Kept(4, 5, 2),
        "selective": _Kept(3, 4, 1),
        "full": _Kept(1, 0, 0),
    },
}
_MOMENTS: Mapping[OptimizerName, tuple[int, int]] = {
    "adamw": (2, 2),
    "sgd": (1, 1),
    "adafactor": (0, 0),  # sums of rows and columns, and of vectors, are few
    "lion": (1, 1),
    "muon": (1, 2),
    "lars": (1, 1),
    "lamb": (2, 2),
}
"""Moments of the size of a parameter: of a matrix in a block, and of any other parameter."""
_KEYS_AND_VALUES = 2
"""Keys and values among the elements of `none.of_attention`."""
_AT_HEAD_DIM, _AT_HEAD_VOCABULARY = 2, 2


def mesh_limits(
    training: TrainingSpec, ranks_per_node: int, memory_limit: int | None
) -> MeshLimits:
    """The limits of every mesh of the job."""
    batch = 0 if training.brings_program else training.train.global_batch
    return MeshLimits(
        ranks_per_node=ranks_per_node,
        micro_batches=batch // training.train.micro_batch,
        memory=memory_model(training),
        memory_limit=memory_limit,
        why_no_schedule=training.parallel.why_no_schedule,
    )


def memory_model(training: TrainingSpec) -> MemoryModel | None:
    """The sizes of the model; None if the spec does not describe it."""
    if training.has_own_model or training.recipe not in BUILT_IN_RECIPES:
        return None
    model = training.model
    if _lacks_sizes(model):
        return None
    one = training.model_copy(update={"model": model.model_copy(update={"layers": 1})})
    shapes = shapes_of(one)
    elements = {name: prod(shape) for name, shape in shapes.items()}
    block = sum(
        elements[name] for name, shape in shapes.items() if "blocks." in name and len(shape) > 1
    )
    # Norms and biases; that an axis divides the latter is left out, they are few.
    vectors = sum(elements[name] for name in shapes if "blocks." in name) - block
    top = sum(count for name, count in elements.items() if "blocks." not in name)
    vocabulary = top - elements["norm.weight"] if training.parallel.vocabulary_parallel else 0
    whole = top - vocabulary + vectors * model.layers
    tokens = training.train.micro_batch * model.positions
    whole_activations, divided_activations = _activations_per_token(
        model,
        training.vocabulary or BYTE_VOCABULARY,
        divides_vocabulary=vocabulary > 0,
        divides_sequence=training.parallel.sequence_parallel,
    )
    return MemoryModel(
        block=block,
        blocks=model.layers,
        whole=whole,
        divided_activations=divided_activations * tokens,
        whole_activations=whole_activations * tokens + _mask(model),
        compute_bytes=2 if model.dtype == "bfloat16" else 4,
        gathers_blocks=4 * (block * model.layers + vocabulary + whole) > SMALL_MODEL_BYTES,
        vocabulary=vocabulary,
        zero=training.parallel.zero,
        gathered_activations=tokens * _gathered_per_token(training),
        schedule=training.parallel.schedule,
        moments=_moments(training.train),
        exchanges_updates=training.train.optimizer.name == "muon",
    )


def shapes_of(training: TrainingSpec, vocabulary: int | None = None) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter of a built-in model, by name. `vocabulary`: its size, in
    place of the spec's; of one that is not known yet, the smallest."""
    model = training.model
    if model.family == "vit":
        return vit_shapes(model)
    return parameter_shapes(model, vocabulary or training.vocabulary or BYTE_VOCABULARY)


def memory_faults(limits: MeshLimits, parallel: ParallelSpec) -> list[SpecFault]:
    """The fault of a mesh whose ranks need more memory than allowed."""
    why = limits.why_too_large(parallel.mesh)
    message = f"the mesh {parallel.product} needs {why}"
    path, beside = "resources.memory_per_worker_bytes", ("model", "optim", "train", "parallel")
    return [SpecFault(path=path, message=message, beside=beside)] if why else []


def group_faults(training: TrainingSpec) -> list[SpecFault]:
    """The groups of `train.optimizer` to which no parameter of a built-in model belongs."""
    groups = training.train.optimizer.groups
    is_known = not training.has_own_model and training.recipe in BUILT_IN_RECIPES
    if not groups or not is_known or _lacks_sizes(training.model):
        return []
    names = list(shapes_of(training))
    optimizer = training.train.optimizer
    unused = {id(group) for group in optimizer.groups_without(names)}
    return [
        SpecFault(
            path=f"train.optimizer.groups.{index}.match",
            message=optimizer.describe_unused(group, names),
            beside=("model", "train.optimizer.groups"),
        )
        for index, group in enumerate(groups)
        if id(group) in unused
    ]


def _moments(train: TrainSpec) -> tuple[int, int]:
    """As `_MOMENTS`, with the moving average."""
    optimizer = train.optimizer
    of_blocks, of_rest = _MOMENTS[optimizer.name]
    if optimizer.name == "sgd" and not optimizer.momentum:
        of_blocks = of_rest = 0
    average = int(train.ema is not None)
    return of_blocks + average, of_rest + average


def _lacks_sizes(model: ModelSpec) -> bool:
    """Whether the sizes are not known yet, or only to a library, or the spec is refused for what
    it says of images."""
    if model.family == "transformers":
        return True
    if model.family == "llama":
        return not model.has_sizes
    sizes = (model.image_size, model.patch_size, model.classes)
    return None in sizes or not model.positions


def _width(model: ModelSpec) -> int:
    """Width of all heads of queries."""
    return model.heads * model.width


def _mask(model: ModelSpec) -> int:
    """Elements of the mask of attention that all blocks with a window share."""
    has_window = any(model.window_of(block) is not None for block in range(model.layers))
    return model.sequence_length**2 if has_window else 0


def _gathered_per_token(training: TrainingSpec) -> int:
    """Elements of keys and values that a block keeps of all positions, of the whole model."""
    if training.parallel.context_method != "all_gather":
        return 0
    plain, _ = _blocks(training.model)
    return _KEYS_AND_VALUES * _width(training.model) * plain


def _blocks(model: ModelSpec) -> tuple[int, int]:
    """The number of blocks that keep everything, and of those that are checkpointed; one of the
    latter computes again."""
    if model.activation_checkpointing == "none":
        return model.layers, 0
    checkpointed = ceil(model.layers / model.activation_checkpointing_every)
    return model.layers - checkpointed + 1, checkpointed


def _activations_per_token(
    model: ModelSpec, size: int, *, divides_vocabulary: bool, divides_sequence: bool
) -> tuple[int, int]:
    """Elements of the whole model that no axis divides, and those that an axis may divide; `size`:
    of the vocabulary."""
    mode, kept = model.activation_checkpointing, _KEPT[model.family]
    plain, checkpointed = _blocks(model)
    whole, divided = (
        plain * entire + checkpointed * few
        for entire, few in zip(kept["none"].counted(model), kept[mode].counted(model), strict=True)
    )
    if divides_sequence:
        whole, divided = 0, divided + whole
    if model.family == "vit":
        patch = model.images.patch_values  # the input of the first layer
        of_image = _AT_HEAD_VOCABULARY * model.images.classes
        return whole + _AT_HEAD_DIM * model.dim + patch + of_image // model.positions, divided
    logits = _AT_HEAD_VOCABULARY * size
    at_head = _AT_HEAD_DIM * model.dim + (0 if divides_vocabulary else logits)
    return whole + at_head, divided + (logits if divides_vocabulary else 0)
