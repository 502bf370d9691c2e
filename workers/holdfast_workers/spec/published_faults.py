"""The faults of a model that begins with published weights. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_workers.spec.fields import Section
from holdfast_workers.spec.model import OF_PUBLISHED, ModelSpec
from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.training import TrainingSpec

_FROM = "model.from"
_NOT_OF_LIBRARY = (
    *("parallel.tp", "parallel.pp", "parallel.cp", "parallel.sequence_parallel"),
    *("parallel.vocabulary_parallel", "model.compile", "model.dropout"),
)


def published_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Every fault of `model.from` that follows from the spec alone."""
    model = spec.model
    if model.family == "transformers":
        yield from _library_faults(spec)
    if model.source is None:
        if model.published is not None:
            message = "published is set by the server, for a model with `from`: remove it"
            yield SpecFault(path="model.published", message=message)
        return
    if model.family == "vit":
        message = "published weights are read for llama and transformers, not for vit"
        yield SpecFault(path=_FROM, message=message, beside=("model.family",))
        return
    if not model.source.startswith("/"):
        message = (
            f"{model.source!r} is not an absolute path: name a folder with config.json and "
            "safetensors that every node can read; nothing is downloaded from a hub"
        )
        yield SpecFault(path=_FROM, message=message)
    if not spec.data.sources:
        message = (
            "a published model has a tokenizer of its own: name the texts in data.sources; "
            "data.tokenizer is that of the folder then, unless it is set"
        )
        yield SpecFault(path=_FROM, message=message, beside=("data.sources",))
    yield from _sizes_faults(model)


def _library_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    if spec.model.source is None:
        message = "the family transformers is for published models: set `from`"
        yield SpecFault(path=_FROM, message=message, beside=("model.family",))
    for path in _NOT_OF_LIBRARY:
        # Not whether it is set: a resolved spec, with the defaults of all fields, is valid too.
        section, _, name = path.partition(".")
        values: Section = getattr(spec, section)
        default = type(values).model_fields[name].default
        if getattr(values, name) == default:
            continue
        message = f"{name} cannot be combined with the family transformers, which runs on "
        message += "dp_replicate and dp_shard: remove it, or use the family llama"
        if name == "dropout":
            message = "the folder's config.json determines the dropout: remove it"
        yield SpecFault(path=path, message=message, beside=("model.family",))
    published = spec.model.published
    if published is not None and published.config is None:
        message = "it lacks the `config` of the folder: remove it, and the server reads the folder"
        yield SpecFault(path="model.published", message=message, beside=("model.family",))


def _sizes_faults(model: ModelSpec) -> Iterator[SpecFault]:
    if model.published is None:
        for name in OF_PUBLISHED:
            # Not whether it is set: a resolved spec, with the defaults of all fields, is valid too.
            if getattr(model, name) != ModelSpec.model_fields[name].default:
                message = f"the folder of `from` determines {name}: remove it"
                yield SpecFault(path=f"model.{name}", message=message, beside=(_FROM,))
        return
    if model.published.sizes not in (None, model.sizes_digest):
        message = (
            "the sizes of the model are not those that the folder of `from` had: remove "
            f"`published`, {', '.join(OF_PUBLISHED[:-1])} and {OF_PUBLISHED[-1]}, and the server "
            "reads the folder again"
        )
        yield SpecFault(path="model.published", message=message, beside=("model",))
    most = model.published.positions
    if most is not None and model.sequence_length > most:
        message = (
            f"sequence_length {model.sequence_length} is longer than the {most} positions that "
            f"the model of `from` was made for: use at most {most}"
        )
        yield SpecFault(path="model.sequence_length", message=message, beside=(_FROM,))
