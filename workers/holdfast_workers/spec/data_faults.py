"""The faults of the section `data` of a recipe that reads texts. Pure.

What a family without texts has not is in `model_faults.py`, and what a user's function or program
makes no use of is known to the service.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.train import BYTES, DataSpec, SourceSpec, ValidationSpec
from holdfast_workers.spec.training import TrainingSpec

OF_SOURCES = (
    *("tokenizer", "document_end", "bad_records", "shuffle_gb", "validation"),
    *("prepared", "special_tokens"),
)
"""Fields of `data` that have an effect on `sources` only."""
_SOURCES = "data.sources"


def data_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    """Every fault of the section that follows from the spec alone."""
    data = spec.data
    if spec.model.family == "vit":
        return
    if not data.sources:
        yield from _faults_without_sources(data)
        return
    if data.source != DataSpec().source:
        message = "a job reads either `source` or `sources`: remove one of them"
        yield SpecFault(path="data.source", message=message, beside=(_SOURCES,))
    yield from _tokenizer_faults(data)
    for path, source in data.read_sources.items():
        yield from _source_faults(path, source)
    yield from _mixture_faults(data.sources)
    yield from _validation_faults(data)
    yield from _prepared_faults(data)


def _faults_without_sources(data: DataSpec) -> Iterator[SpecFault]:
    for name in OF_SOURCES:
        # Not whether it is set: a resolved spec, with the defaults of all fields, is valid too.
        if getattr(data, name) != DataSpec.model_fields[name].default:
            message = (
                f"{name} has an effect on `sources` only, and there are none: name the files in "
                f"`sources` in place of `source`, or remove {name}"
            )
            yield SpecFault(path=f"data.{name}", message=message, beside=(_SOURCES,))


def _tokenizer_faults(data: DataSpec) -> Iterator[SpecFault]:
    if data.tokenizer != BYTES and (why := _path_fault(data.tokenizer)):
        message = (
            f"{data.tokenizer!r} {why}: write `{BYTES}`, or the absolute path of a tokenizer.json "
            "or of the folder of a model with one, which every node can read"
        )
        yield SpecFault(path="data.tokenizer", message=message)
    if data.document_end is None:
        return
    if data.tokenizer == BYTES:
        message = (
            f"the tokenizer `{BYTES}` ends each document with a zero byte: remove document_end, or "
            "set a tokenizer that has this token"
        )
        yield SpecFault(path="data.document_end", message=message, beside=("data.tokenizer",))
    elif not data.document_end:
        message = "it is empty: write a token of the tokenizer, or null for its `eos_token`"
        yield SpecFault(path="data.document_end", message=message)


def _source_faults(path: str, source: SourceSpec) -> Iterator[SpecFault]:
    if why := _path_fault(source.path, in_bucket=source.bucket is not None):
        message = (
            f"{source.path!r} {why}: write an absolute path that every node can read, or "
            "s3://bucket/prefix"
        )
        yield SpecFault(path=f"{path}.path", message=message)
    if not source.text:
        message = "it is empty: write the name of the column, or key, with a document's text"
        yield SpecFault(path=f"{path}.text", message=message)


def _path_fault(path: str, *, in_bucket: bool = False) -> str | None:
    """Why the text is not a whole path. The name of a bucket: `checkpoint/location_faults.py`."""
    if any(character < " " or character == "\x7f" for character in path):
        return "has a control character"
    if not in_bucket and not path.startswith("/"):
        return "is not an absolute path"
    return None


def _mixture_faults(sources: tuple[SourceSpec, ...]) -> Iterator[SpecFault]:
    weighted = sum(source.weight is not None for source in sources)
    if weighted:
        if weighted < len(sources):
            message = (
                f"{weighted} of {len(sources)} sources have a weight: give one to each of them, or "
                "to none"
            )
            yield SpecFault(path=_SOURCES, message=message)
        return
    first: dict[tuple[str | None, ...], int] = {}
    for at, source in enumerate(sources):
        before = first.setdefault((source.path, source.text, source.endpoint), at)
        if before != at:
            message = (
                f"source {before} has the same path and text, and an epoch would have each of its "
                "tokens twice: remove one of them, or give each source a weight"
            )
            yield SpecFault(path=f"{_SOURCES}.{at}.path", message=message)


def _validation_faults(data: DataSpec) -> Iterator[SpecFault]:
    validation, path = data.validation, "data.validation"
    if validation is None:
        return
    if (validation.path is None) == (validation.share is None):
        message = "name either the files of validation by `path`, or a `share` of the sources"
        yield SpecFault(path=path, message=message)
    elif validation.share is not None:
        defaults = ValidationSpec.model_fields
        for name in ("text", "endpoint", "region", "secret", "prepared"):
            if getattr(validation, name) != defaults[name].default:
                message = f"{name} has an effect with `path` only: remove it, or `share`"
                yield SpecFault(path=f"{path}.{name}", message=message)
        if data.prepared and not any(each.held_out for each in data.prepared):
            message = (
                f"none of the sources' documents is in the share of {validation.share:g}: raise "
                "it, or name files by `path`"
            )
            yield SpecFault(path=f"{path}.share", message=message, beside=("data.prepared",))
    for at, source in enumerate(data.sources):
        same = (source.path, source.endpoint) == (validation.path, validation.endpoint)
        trained = validation.prepared is not None and validation.prepared.digest in {
            each.digest for each in data.prepared[at : at + 1]
        }
        if same or trained:
            message = (
                f"source {at} has the same {'path' if same else 'documents'}, and would be trained "
                "on: name other files, or a `share` of the sources"
            )
            yield SpecFault(path=f"{path}.path", message=message, beside=(f"{_SOURCES}.{at}",))


def _prepared_faults(data: DataSpec) -> Iterator[SpecFault]:
    sets, path = data.prepared, "data.prepared"
    remedy = "remove `prepared`, and the server prepares the sources"
    validation = data.validation
    if validation and validation.path and bool(sets) != bool(validation.prepared):
        message = f"the token sets of sources and validation are made together: {remedy}"
        yield SpecFault(path="data.validation.prepared", message=message, beside=(path,))
    if sets and len(sets) != len(data.sources):
        message = f"its length is {len(sets)}, and that of sources {len(data.sources)}: {remedy}"
        yield SpecFault(path=path, message=message, beside=(_SOURCES,))
    made = [
        (f"source {at}", f"{path}.{at}", _SOURCES, source, each)
        for at, (source, each) in enumerate(zip(data.sources, sets, strict=False))
    ]
    if validation and validation.source and validation.prepared:
        pair = validation.source, validation.prepared
        made.append(("validation", "data.validation.prepared", "data.validation.path", *pair))
    for what, place, beside, source, each in made:
        if each.origin != data.origin_of(source):
            message = (
                f"the token set was made of another source, tokenizer or setting than those of "
                f"{what}: {remedy}"
            )
            yield SpecFault(path=place, message=message, beside=(beside,))
    of_job = data.token_sets.values()
    sizes = sorted({each.vocabulary for each in of_job})
    if len(sizes) > 1:
        message = (
            f"its token sets are of vocabularies of {' and '.join(map(str, sizes))} tokens, and a "
            f"job has one tokenizer: {remedy}"
        )
        yield SpecFault(path=path, message=message)
    elif len({(each.tokenizer, each.document_end) for each in of_job}) > 1:
        message = (
            "the tokenizer, or its document end, was changed between the preparation of its token "
            f"sets: {remedy}"
        )
        yield SpecFault(path=path, message=message)
