"""The faults of a built-in model and of its division among ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from holdfast_workers.spec.data_faults import OF_SOURCES
from holdfast_workers.spec.fields import Section
from holdfast_workers.spec.model import ModelSpec
from holdfast_workers.spec.parallel import ParallelSpec
from holdfast_workers.spec.published_faults import published_faults
from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.train import DataSpec
from holdfast_workers.spec.training import TrainingSpec

NEAR_SIZES = 4096
"""Distance from a refused size of an axis within which a legal one is searched."""
MOST_PIXELS = 4096
"""Largest side of an image, in pixels."""
MOST_CLASSES = 1 << 16
_OF_VIT = ("image_size", "patch_size", "classes")
_BESIDE_CP = (
    *("model.sequence_length", "model.kv_heads", "model.heads", "model.compile", "parallel.tp"),
    *("parallel.sequence_parallel", "parallel.context_method"),
)
_NOT_OF_VIT = (
    *("model.kv_heads", "model.sequence_length", "model.rope_theta", "model.rope_scaling"),
    *("model.tied_embeddings", "model.head_size", "model.qkv_bias", "model.qk_norm"),
    *("model.sliding_window", "model.window_from", "model.vocabulary"),
    *("parallel.vocabulary_parallel", "parallel.cp"),
    *("data.sources", *(f"data.{name}" for name in OF_SOURCES)),
)


def model_faults(spec: TrainingSpec) -> list[SpecFault]:
    """The faults of the built-in model and of its sharding; those of sizes only once they are
    known."""
    faults = [*published_faults(spec)]
    model, parallel = spec.model, spec.parallel
    if not model.has_sizes:
        return faults
    kv_heads = model.kv_heads or model.heads

    def add(path: str, message: str, *beside: str) -> None:
        faults.append(SpecFault(path=path, message=message, beside=beside))

    if model.head_size is None and model.dim % model.heads:
        add("model.heads", f"dim {model.dim} is not divisible by heads {model.heads}", "model.dim")
    elif model.family == "llama" and model.width % 2:
        add(
            "model.heads" if model.head_size is None else "model.head_size",
            f"head size {model.width} must be even for rotary positions",
            *("model.dim", "model.family"),
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        add(
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor:g} must exceed low_freq_factor "
            f"{scaling.low_freq_factor:g}",
            "model.rope_scaling.low_freq_factor",
        )
    if model.heads % kv_heads:
        message = f"heads {model.heads} is not divisible by kv_heads {kv_heads}"
        add("model.kv_heads", message, "model.heads")
    faults += _tensor_faults(spec)
    faults += _pipeline_faults(spec)
    if parallel.sequence_parallel and model.compile:
        message = "sequence_parallel cannot be combined with compile"
        add("parallel.sequence_parallel", message, "model.compile")
    if parallel.cp > 1:
        for why in _why_not_cp(model, parallel):
            add("parallel.cp", why, *_BESIDE_CP)
    return [*faults, *(_vit_faults(spec) if model.family == "vit" else _text_faults(spec))]


def _tensor_faults(spec: TrainingSpec) -> list[SpecFault]:
    """The faults of the built-in model's division by tp."""
    faults: list[SpecFault] = []
    model, parallel = spec.model, spec.parallel
    kv_heads = model.kv_heads or model.heads

    def add(path: str, message: str, *beside: str) -> None:
        faults.append(SpecFault(path=path, message=message, beside=beside))

    if model.heads % parallel.tp:
        message = f"heads {model.heads} is not divisible by tp {parallel.tp}"
        add("parallel.tp", message, "model.heads")
    if model.family == "llama" and kv_heads % parallel.tp:
        message = f"kv_heads {kv_heads} is not divisible by tp {parallel.tp}"
        add("parallel.tp", message, "model.kv_heads", "model.heads", "model.family")
    if model.family == "llama" and model.sequence_length % parallel.tp:
        add(
            "parallel.tp",
            f"sequence_length {model.sequence_length} is not divisible by tp {parallel.tp}",
            *("model.sequence_length", "model.family"),
        )
    vocabulary = spec.vocabulary
    if parallel.vocabulary_parallel and vocabulary is not None and vocabulary % parallel.tp:
        add(
            "parallel.vocabulary_parallel",
            f"the vocabulary of {vocabulary} is not divisible by tp {parallel.tp}: use another tp, "
            "or remove vocabulary_parallel",
            *("data.tokenizer", "parallel.tp"),
        )
    if model.ffn_dim is not None and model.ffn_dim % parallel.tp:
        message = f"ffn_dim {model.ffn_dim} is not divisible by tp {parallel.tp}"
        add("parallel.tp", message, "model.ffn_dim")
    return faults


def _pipeline_faults(spec: TrainingSpec) -> list[SpecFault]:
    """The faults of the built-in model's division into stages."""
    faults: list[SpecFault] = []
    model, parallel, train = spec.model, spec.parallel, spec.train
    if parallel.pp == 1:
        return faults

    def add(path: str, message: str, *beside: str) -> None:
        faults.append(SpecFault(path=path, message=message, beside=beside))

    schedule, stages = parallel.schedule, parallel.stages_on_a_rank
    count = parallel.pp * stages
    if model.layers < count:
        most = model.layers // stages
        nearest = f"use {most} at most" if most else f"layers must be {count} or more"
        add(
            "parallel.pp",
            f"{model.layers} layers cannot be divided among pp {parallel.pp} × {stages} stages per "
            f"rank = {count} stages: {nearest}",
            *("model.layers", "parallel.stages_per_rank", "parallel.schedule"),
        )
    needed = {"gpipe": "1", "1f1b": "1", "interleaved": "2 or more", "zero_bubble": "2"}[schedule]
    if stages != (stages if needed == "2 or more" and stages > 1 else int(needed[0])):
        add(
            "parallel.stages_per_rank",
            f"schedule {schedule} has {needed} stages per rank, not {stages}",
            "parallel.schedule",
        )
    passes = -(-train.global_batch // (train.micro_batch * parallel.data_parallel))
    if why := parallel.why_no_schedule(passes):
        add("parallel.schedule", why, "train.global_batch", "train.micro_batch", "parallel")
    if parallel.zero in (2, 3):
        add(
            "parallel.zero",
            f"a pipeline keeps parameters and gradients whole during a step: use zero 1, not "
            f"{parallel.zero}",
        )
    if schedule == "zero_bubble":
        for path, is_set in (
            ("model.tied_embeddings", model.tied_embeddings),
            ("model.compile", model.compile),
            ("model.activation_checkpointing", model.activation_checkpointing != "none"),
        ):
            if is_set:
                name = path.removeprefix("model.")
                add(path, f"{name} cannot be combined with schedule zero_bubble: use 1f1b")
    return faults


def _text_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    model, parallel = spec.model, spec.parallel
    tokens = spec.data.vocabulary
    if model.vocabulary is not None and tokens is not None and model.vocabulary < tokens:
        message = (
            f"the tokenizer has {tokens} tokens, and the model knows {model.vocabulary}: use the "
            "tokenizer that the model was made with"
        )
        yield SpecFault(path="model.vocabulary", message=message, beside=("data.tokenizer",))
    has_window = any(model.window_of(block) is not None for block in range(model.layers))
    if parallel.cp > 1 and parallel.context_method == "ring" and has_window:
        message = (
            f"ring cannot be combined with the sliding_window of {model.sliding_window}: use "
            "all_gather or ulysses"
        )
        beside = ("model.sliding_window", "parallel.cp")
        yield SpecFault(path="parallel.context_method", message=message, beside=beside)
    for name in _OF_VIT:
        if getattr(model, name) is not None:
            message = f"{name} is for models of the family vit: remove it"
            yield SpecFault(path=f"model.{name}", message=message, beside=("model.family",))


def _vit_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    model, parallel = spec.model, spec.parallel
    for path in _NOT_OF_VIT:
        # Not whether it is set: a resolved spec, with the defaults of all fields, is valid too.
        section, _, name = path.partition(".")
        values: Section = getattr(spec, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            message = f"a model of the family vit has no {name}: remove it"
            yield SpecFault(path=path, message=message)
    if spec.data.source == DataSpec().source:
        message = "a model of the family vit needs a folder with a subfolder of images per class"
        yield SpecFault(path="data.source", message=message)
    missing = [name for name in _OF_VIT if getattr(model, name) is None]
    for name in missing:
        message = f"a model of the family vit needs {name}: set it"
        yield SpecFault(path=f"model.{name}", message=message)
    if missing:
        return
    images = model.images
    for name, size, most in (
        ("image_size", images.image_size, MOST_PIXELS),
        ("classes", images.classes, MOST_CLASSES),
    ):
        if size > most:
            message = f"{name} {size} is too large: at most {most} can be stored"
            yield SpecFault(path=f"model.{name}", message=message)
    if images.classes < 2:
        message = "classes is 1: there is nothing to learn, set at least 2"
        yield SpecFault(path="model.classes", message=message)
    if images.image_size % images.patch_size:
        message = (
            f"image_size {images.image_size} is not divisible by patch_size {images.patch_size}"
        )
        yield SpecFault(path="model.patch_size", message=message, beside=("model.image_size",))
    elif parallel.sequence_parallel and model.positions % parallel.tp:
        message = (
            f"sequence_parallel divides the {model.positions} patches of an image: their number "
            f"is not divisible by tp {parallel.tp}"
        )
        beside = ("parallel.tp", "model.image_size", "model.patch_size")
        yield SpecFault(path="parallel.sequence_parallel", message=message, beside=beside)


def _why_not_cp(model: ModelSpec, parallel: ParallelSpec) -> list[str]:
    """Why the ranks of `cp` cannot divide the sequences of the model."""
    found = []
    cp, length, heads = parallel.cp, model.sequence_length, model.kv_heads or model.heads
    by_heads = parallel.context_method == "ulysses"
    factors = [] if by_heads else [("2", 2)]
    if parallel.sequence_parallel and parallel.tp > 1:
        factors.append((f"tp {parallel.tp}", parallel.tp))
    others = math.prod(size for _, size in factors)
    parts, of_rank = others * cp, heads // parallel.tp

    def is_legal(size: int) -> bool:
        return not length % (others * size) and not (by_heads and of_rank % size)

    nearest = _near(cp, is_legal, min(length, of_rank) if by_heads else length // others)
    if length % parts:
        product = " × ".join([*(name for name, _ in factors), f"cp {cp}"])
        total = f" = {parts}" if factors else ""
        unit = math.lcm(parts, parallel.tp)
        lengths = [n for n in (length // unit * unit, -(-length // unit) * unit) if n]
        found.append(
            f"sequence_length {length} is not divisible by {product}{total}: use a "
            f"sequence_length of {_either(lengths)}, or a cp of {_either(nearest)}"
        )
    if by_heads and not heads % parallel.tp and of_rank % cp:
        found.append(
            f"kv_heads {heads} / tp {parallel.tp} = {of_rank} is not divisible by cp {cp}, as "
            f"context_method ulysses needs: use a cp of {_either(nearest)}, or another method"
        )
    if model.compile:
        found.append(f"cp {cp} cannot be combined with compile: use a cp of 1, or compile: false")
    return found


def _near(size: int, is_legal: Callable[[int], bool], largest: int) -> list[int]:
    """The legal sizes next to `size`, of those that are not far from it; 1 is legal."""
    start, end = min(size - 1, largest), min(2 * size, size + NEAR_SIZES, largest)
    below = next((n for n in range(start, max(1, start - NEAR_SIZES), -1) if is_legal(n)), 1)
    above = next((n for n in range(size + 1, end + 1) if is_legal(n)), None)
    return [below] if above is None else [below, above]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
