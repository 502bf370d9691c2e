"""The faults of a model that begins with published weights. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_workers.spec.model import OF_PUBLISHED, ModelSpec
from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.training import TrainingSpec

_FROM = "model.from"


def published_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Every fault of `model.from` that follows from the spec alone."""
    model = spec.model
    if model.source is None:
        if model.published is not None:
            message = "published is set by the server, for a model with `from`: remove it"
            yield SpecFault(path="model.published", message=message)
        return
    if model.family != "llama":
        message = f"published weights are read for the family llama, not {model.family}"
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
    if model.sequence_length > (most := model.published.positions):
        message = (
            f"sequence_length {model.sequence_length} is longer than the {most} positions that "
            f"the model of `from` was made for: use at most {most}"
        )
        yield SpecFault(path="model.sequence_length", message=message, beside=(_FROM,))
