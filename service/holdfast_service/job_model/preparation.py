"""How the sources of a job become token sets, and the folder of a published model a set of weights:
what is asked of the cluster, and what it reports. Pure.

Each source is prepared for itself, so that jobs share it whatever their other sources and weights
are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast_service.wording import duration, enumeration, plural
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.checkpoint.storage import joined
from holdfast_workers.spec import (
    OF_PUBLISHED,
    ComputeDtype,
    DataSpec,
    Family,
    ModelSpec,
    PreparedSpec,
    PublishedSpec,
    RemoteTierSpec,
    SourceSpec,
    SpecFault,
    SpecialTokenSpec,
    TrainingSpec,
)

_SET_NAME = re.compile(r"[0-9a-f]{32}")
TOKENS = "tokens"
"""The folder of token sets, beside those of jobs."""
WEIGHTS = "weights"
"""The folder of published weights, beside those of jobs."""
_LEAST_SHARE = 0.01
"""Share that must have been read before the rest is estimated."""


@dataclass(frozen=True)
class SourceRequest:
    """A source to be prepared."""

    data: DataSpec
    """The section, with this source alone."""
    remote: RemoteTierSpec
    """How the storage of the token sets is reached."""
    root: str
    """URI below which the token sets are."""
    refuse_local: bool = False
    """Whether a source at an endpoint on the node itself is refused."""
    sequence_length: int | None = None
    """For which the samples of the token set are counted."""
    apart_from: tuple[SourceSpec, ...] = ()
    """Sources whose files it must not have: those of the job, if it is of validation."""

    @property
    def source(self) -> SourceSpec:
        return self.data.sources[0]

    @property
    def origin(self) -> str:
        return self.data.origin_of(self.source)

    @property
    def name(self) -> str:
        """Equal for requests that one preparation serves."""
        share = self.data.bad_records
        parts: tuple[object, ...]
        parts = (self.root, self.origin, self.source.secret, self.remote.secret, share)
        if self.apart_from:
            parts = (*parts, self.apart_from)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class WeightsRequest:
    """The folder of a published model, whose weights are to be read."""

    folder: str
    remote: RemoteTierSpec
    """How the storage of their manifest is reached."""
    root: str
    """URI below which the manifests are."""
    family: Family = "llama"
    dtype: ComputeDtype = "float32"
    """In which the model is computed."""

    @property
    def name(self) -> str:
        """Equal for requests that one preparation serves."""
        parts = (WEIGHTS, self.root, self.folder, self.remote.secret, self.family, self.dtype)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class PreparePhase(StrEnum):
    LISTING = "listing"
    TOKENIZING = "tokenizing"
    READY = "ready"
    REFUSED = "refused"


@dataclass(frozen=True)
class SourceProgress:
    """How far the preparation of a source is."""

    path: str
    phase: PreparePhase = PreparePhase.LISTING
    files: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    """Bytes of the source that are tokenized, earlier tries included."""
    bytes_per_s: float = 0.0
    tokens: int = 0
    documents: int = 0
    held_out_tokens: int = 0
    """Tokens of documents that are kept from training; the others are counted above."""
    bad_count: int = 0
    bad: tuple[str, ...] = ()
    """The first records that were left out: file, row and why."""
    waits: str = ""
    """What it waits for at present."""
    error: str = ""
    """Why it is refused."""
    prepared: PreparedSpec | None = None
    """The token set, once it is there."""
    special_tokens: dict[str, SpecialTokenSpec] = field(default_factory=dict)
    """Of its tokenizer, by role."""

    @property
    def is_over(self) -> bool:
        return self.phase in (PreparePhase.READY, PreparePhase.REFUSED)

    @property
    def left_s(self) -> float | None:
        """Seconds until the end at the present pace; None: not known."""
        if self.phase is PreparePhase.READY:
            return 0.0
        return _left_s(self.total_bytes, self.done_bytes, self.bytes_per_s)

    @property
    def expected_tokens(self) -> int | None:
        """The tokens of the whole source, estimated from those that are there; None: not known."""
        if self.phase is PreparePhase.READY:
            return self.tokens
        if not self.done_bytes or self.done_bytes < _LEAST_SHARE * self.total_bytes:
            return None
        return round(self.tokens * self.total_bytes / self.done_bytes)


@dataclass(frozen=True)
class WeightsProgress:
    """How far the weights of a folder are read."""

    path: str
    total_bytes: int = 0
    """Of its files of weights; 0: its configuration is being read."""
    done_bytes: int = 0
    """Of the files that are read to their end."""
    bytes_per_s: float = 0.0
    waits: str = ""
    """What it waits for at present."""
    error: str = ""
    """Why the folder is refused."""
    family: str = ""
    """As its configuration names it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Those of the section `model` that its configuration determines, as in JSON."""
    published: PublishedSpec | None = None
    """The weights, once all are read."""

    @property
    def is_over(self) -> bool:
        return bool(self.error) or self.published is not None

    @property
    def refusal(self) -> str:
        """Why the folder is refused, with its name; "": it is not."""
        is_named = not self.error or self.path in self.error
        return self.error if is_named else f"{self.path}: {self.error}"

    @property
    def text(self) -> str:
        """What a job waits for while they are read."""
        text = f"the configuration of {self.path} is being read"
        if self.total_bytes:
            done, total = size_of(self.done_bytes), size_of(self.total_bytes)
            text = f"{done} of {total} of the weights of {self.path} are read"
            left_s = _left_s(self.total_bytes, self.done_bytes, self.bytes_per_s)
            if left_s is not None and left_s >= 1:
                text += f", about {duration(left_s)} left"
        return f"{text}; {self.waits}" if self.waits else text


def _left_s(total_bytes: int, done_bytes: int, bytes_per_s: float) -> float | None:
    """Seconds until the end at the present pace; None: not known."""
    if not bytes_per_s or done_bytes < _LEAST_SHARE * total_bytes:
        return None
    return (total_bytes - done_bytes) / bytes_per_s


def root_of(remote: RemoteTierSpec, data_dir: Path, kind: str = TOKENS) -> str:
    """The URI below which the token sets of a job with this resolved `remote` are, or what else
    `kind` names."""
    return str(data_dir.absolute() / kind) if remote.uri is None else joined(remote.uri, kind)


def place_faults(spec: TrainingSpec, data_dir: Path) -> list[SpecFault]:
    """Token sets and weights of a resolved spec that are elsewhere than the server puts them: the
    job's credentials are for that place alone."""
    remote = spec.checkpoint.remote
    tokens, weights = (root_of(remote, data_dir, kind) for kind in (TOKENS, WEIGHTS))
    found = [
        SpecFault(
            path=f"{place}.uri",
            message=f"{each.uri!r} is not a token set below {tokens}, where those of this job are: "
            "remove `prepared`, and the server prepares the sources",
        )
        for place, each in spec.data.token_sets.items()
        if not _is_set_below(tokens, each.uri)
    ]
    published = spec.model.published
    if published is not None and not _is_set_below(weights, published.uri):
        message = (
            f"{published.uri!r} is no set of weights below {weights}, where those of this job are: "
            "remove `published`, and the server reads the folder of `from`"
        )
        found.append(SpecFault(path="model.published.uri", message=message))
    return found


def _is_set_below(root: str, uri: str) -> bool:
    return _SET_NAME.fullmatch(uri.removeprefix(f"{root}/")) is not None


def requests_of(spec: TrainingSpec, root: str, *, refuse_local: bool) -> list[SourceRequest]:
    """A request for each source of a resolved spec, then one for files of validation. `root`: see
    `root_of`."""
    alone = spec.data.model_copy(update={"prepared": (), "special_tokens": {}})

    def request(source: SourceSpec, apart_from: tuple[SourceSpec, ...] = ()) -> SourceRequest:
        return SourceRequest(
            alone.model_copy(update={"sources": (source,)}),
            spec.checkpoint.remote,
            root,
            refuse_local,
            spec.model.sequence_length,
            apart_from,
        )

    sources, validation = spec.data.sources, spec.data.validation
    found = [request(source) for source in sources]
    if validation is not None and validation.source is not None:
        found.append(request(validation.source, sources))
    return found


def needs_preparation(data: DataSpec) -> bool:
    return bool(data.sources) and not data.prepared


def weights_request(spec: TrainingSpec, root: str) -> WeightsRequest | None:
    """Of a resolved spec; None: its model begins with no published weights, or they are read.
    `root`: see `root_of`."""
    model = spec.model
    if model.source is None or model.has_sizes:
        return None
    return WeightsRequest(model.source, spec.checkpoint.remote, root, model.family, model.dtype)


def with_weights(model: ModelSpec, progress: WeightsProgress) -> ModelSpec | None:
    """The section with the weights that were read, and all that their configuration determines;
    None: they are not read yet. Raises ValidationError for sizes that no model here has."""
    if progress.published is None:
        return None
    kept = model.model_dump(mode="json", exclude={*OF_PUBLISHED, "published"})
    found = {name: progress.fields[name] for name in OF_PUBLISHED if name in progress.fields}
    model = ModelSpec.model_validate({**kept, **found, "published": progress.published})
    published = progress.published.model_copy(update={"sizes": model.sizes_digest})
    return model.model_copy(update={"published": published})


def with_token_sets(data: DataSpec, progress: Sequence[SourceProgress]) -> DataSpec | None:
    """The section with the token sets that were made, and their tokenizer's special tokens; None: a
    source has none yet."""
    prepared = tuple(each.prepared for each in progress if each.prepared is not None)
    if len(prepared) < len(progress):
        return None
    special = progress[0].special_tokens
    changes: dict[str, object] = {
        "prepared": prepared[: len(data.sources)],
        "special_tokens": special,
    }
    if data.validation is not None and len(prepared) > len(data.sources):
        apart = data.validation.model_copy(update={"prepared": prepared[-1]})
        changes["validation"] = apart
    return data.model_copy(update=changes)


def wait_text(progress: Sequence[SourceProgress]) -> str:
    """What a job waits for while its sources are prepared."""
    total, done = sum(p.total_bytes for p in progress), sum(p.done_bytes for p in progress)
    listed = sum(p.phase is PreparePhase.LISTING for p in progress)
    text = "its sources are being listed"
    if total:
        tokens = sum(p.tokens for p in progress)
        text = f"{size_of(done)} of {size_of(total)} of its sources are tokens: {tokens:,} so far"
        expected = [p.expected_tokens for p in progress if p.expected_tokens is not None]
        if len(expected) == len(progress) and sum(expected) > tokens:
            text += f", about {float(f'{sum(expected):.3g}'):,.0f} in the end"
        if listed:
            text += f"; {plural(listed, 'source')} {'is' if listed == 1 else 'are'} being listed"
        left = [p.left_s for p in progress if p.left_s is not None]
        if len(left) == len(progress) and max(left) >= 1:
            text += f", about {duration(max(left))} left"
    waits = sorted({p.waits for p in progress if p.waits})
    return "; ".join([text, *waits])


def refusals(progress: Sequence[SourceProgress]) -> str:
    """Why sources are refused, an equal reason once for all of them; "": none is."""
    paths: dict[str, list[str]] = {}
    for each in progress:
        if each.phase is PreparePhase.REFUSED:
            paths.setdefault(each.error, []).append(each.path)
    return "; ".join(f"{enumeration(of_error)}: {error}" for error, of_error in paths.items())
