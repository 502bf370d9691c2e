"""The sections `data` and `train`: what a run reads, and how it takes its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast_workers.spec.fields import (
    Endpoint,
    NonNegative,
    Positive,
    Reference,
    Region,
    Section,
    TokenAmount,
)
from holdfast_workers.spec.optimization import OptimizerSpec, ScheduleSpec

BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of the text in UTF-8."""
BYTE_VOCABULARY = 256
SpecialRole = Literal["document_end", "bos", "eos", "pad", "unk"]
DEFAULT_STEPS = 300
MOST_SOURCES = 64
MOST_SHUFFLED_GB = 1e6
MOST_HELD_OUT = 0.5


class SourceSpec(Section):
    """Files whose records are documents of text."""

    path: Reference = Field(
        description="A file, a folder or a glob, as an absolute path that every node can read, or "
        "as s3://bucket/prefix. Text, JSON lines (.jsonl, also .gz or .zst), Parquet, or a data "
        "set that the library `datasets` has saved."
    )
    text: Reference = Field(
        default="text",
        description="The column, or key of a JSON line, with a document's text. A file of text is "
        "one document.",
    )
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Share of the samples that come from this source, relative to the others'. "
        "Without weights, all sources are one: an epoch has each of their tokens once.",
    )
    endpoint: Endpoint = None
    region: Region = None
    secret: Reference | None = Field(
        default=None,
        description="Name of the server's secret with the credentials for this bucket and "
        "endpoint. null: those in the environment of the nodes.",
    )

    @property
    def bucket(self) -> str | None:
        """URI of its bucket; None: a path. The rest is a key or a glob, in which `?` and `#` are
        no parts of a URI."""
        return "/".join(self.path.split("/")[:3]) if self.path.startswith("s3://") else None


class PreparedSpec(Section):
    """The token set of a source."""

    uri: Reference
    origin: Reference = Field(
        description="What it was made of, as `DataSpec.origin_of` says it: with another source, "
        "tokenizer or setting it is not used."
    )
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] = Field(
        description="Digest of the token set, down to its last token."
    )
    vocabulary: Positive
    tokens: Positive
    held_out: NonNegative = Field(
        default=0, description="Tokens that `validation.share` keeps from training."
    )
    sequence_length: Positive | None = Field(
        default=None, description="Targets of a sample for which `samples` was counted."
    )
    samples: Positive | None = Field(default=None, description="Samples of an epoch.")
    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = Field(
        default=None,
        description="Digest (XXH3, 128 bits) of the `tokenizer.json`; for `bytes`, of this word.",
    )
    tokenizer_files: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = Field(
        default=None,
        description="Digest of the record of the tokenizer's files, as they were when this job's "
        "source was prepared; null: none are kept.",
    )
    document_end: NonNegative | None = Field(
        default=None, description="Id of the token that ends each document."
    )


class SpecialTokenSpec(Section):
    """A token of a tokenizer that stands for no text."""

    id: NonNegative
    token: Reference | None = Field(
        default=None, description="null: the tokenizer is `bytes`, whose tokens have no names."
    )


class ValidationSpec(Section):
    """Documents that no step is trained on: files of their own, or a share of the sources."""

    path: Reference | None = Field(
        default=None, description="Files of their own, named as those of a source."
    )
    text: Reference = Field(default="text", description="As of a source.")
    endpoint: Endpoint = None
    region: Region = None
    secret: Reference | None = Field(default=None, description="As of a source.")
    share: Annotated[float, Field(gt=0, le=MOST_HELD_OUT)] | None = Field(
        default=None,
        description="In place of `path`: the share of the sources' documents that is kept. A "
        "document is chosen by its tokens, so all documents that are equal are kept, or none.",
    )
    prepared: PreparedSpec | None = Field(
        default=None, description="The token set of `path`, which the server sets."
    )

    @property
    def source(self) -> SourceSpec | None:
        """The files of their own; None: a share of the sources."""
        if self.path is None:
            return None
        return SourceSpec(
            path=self.path,
            text=self.text,
            endpoint=self.endpoint,
            region=self.region,
            secret=self.secret,
        )


class DataSpec(Section):
    source: Reference = Field(
        default="python-stdlib",
        description="`python-stdlib`, or a path or glob of text files on every node, read as "
        "bytes. For vit: a folder on every node with a subfolder of images for each class.",
    )
    tokenizer: Reference = Field(
        default=BYTES,
        description="`bytes`, or the absolute path of a `tokenizer.json` or of the folder of a "
        "published model with one.",
    )
    sources: Annotated[tuple[SourceSpec, ...], Field(max_length=MOST_SOURCES)] = Field(
        default=(),
        description="In place of `source`: the sources whose documents are turned into tokens "
        "once, before the job takes its nodes.",
    )
    document_end: Reference | None = Field(
        default=None,
        description="The token that ends each document, such as `<|endoftext|>`. null: the "
        "`eos_token` of the `tokenizer_config.json` beside the tokenizer; a zero byte for `bytes`.",
    )
    bad_records: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.001,
        description="Share of a source's records that may be unusable: they are left out, and the "
        "first are named in the event `data.prepared`. With more, the source is refused.",
    )
    shuffle_gb: Annotated[float, Field(gt=0, le=MOST_SHUFFLED_GB, allow_inf_nan=False)] = Field(
        default=10.0,
        description="Tokens among which samples are shuffled, in units of 10^9 bytes: a node reads "
        "so many before it comes to others.",
    )
    validation: ValidationSpec | None = Field(
        default=None,
        description="Documents that are turned into tokens with those of the sources, and are "
        "kept from training.",
    )
    prepared: Annotated[tuple[PreparedSpec, ...], Field(max_length=MOST_SOURCES)] = Field(
        default=(),
        description="The token set of each source, which the server sets: a replay reads the same "
        "tokens.",
    )
    special_tokens: dict[SpecialRole, SpecialTokenSpec] = Field(
        default={},
        description="Of the token sets' tokenizer, which the server sets: `document_end`, and "
        "those of `bos`, `eos`, `pad` and `unk` that the `tokenizer_config.json` beside it names.",
    )

    def origin_of(self, source: SourceSpec) -> str:
        """Digest of all that a source's tokens depend on, but for the content of its files."""
        parts = [source.path, source.text, source.endpoint, self.tokenizer, self.document_end]
        if self.held_out_share:
            parts.append(str(self.held_out_share))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def held_out_share(self) -> float:
        """Share of the sources' documents that is kept from training."""
        return (self.validation.share if self.validation else None) or 0.0

    @property
    def read_sources(self) -> dict[str, SourceSpec]:
        """All sources whose files are read, by their place in the spec."""
        found = {f"data.sources.{at}": source for at, source in enumerate(self.sources)}
        if self.validation is not None and (source := self.validation.source) is not None:
            found["data.validation"] = source
        return found

    @property
    def token_sets(self) -> dict[str, PreparedSpec]:
        """The token sets of all sources, by their place in the spec; {} before they are made."""
        found = {f"data.prepared.{at}": each for at, each in enumerate(self.prepared)}
        if self.validation is not None and self.validation.prepared is not None:
            found["data.validation.prepared"] = self.validation.prepared
        return found

    @property
    def vocabulary(self) -> int | None:
        """Number of the tokenizer's tokens; None: not known before the sources are prepared."""
        if self.prepared:
            return max(each.vocabulary for each in self.prepared)
        return BYTE_VOCABULARY if self.tokenizer == BYTES else None


Determinism = Literal["strict", "fast"]


class TrainSpec(Section):
    tokens: TokenAmount | None = Field(
        default=None,
        description="In place of `steps`: the tokens to train on, such as 20e9. A sample counts as "
        "`model.sequence_length` of them, and the last step is a whole one.",
    )
    epochs: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None,
        description="In place of `steps`: how often each token of `data.sources` without weights "
        "is trained on, such as 2 or 0.5. The last step is a whole one.",
    )
    steps: Positive | None = Field(
        default_factory=lambda given: None if _has_amount(given) else DEFAULT_STEPS,
        json_schema_extra={"default": DEFAULT_STEPS},
        description="Optimizer steps. The server sets those that `tokens` or `epochs` come to; "
        "null: not known before the sources are prepared.",
    )
    global_batch: Positive = Field(default=16, description="Samples per optimizer step.")
    micro_batch: Positive = Field(default=4, description="Samples per rank and forward pass.")
    seed: NonNegative = 7
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Decay of a moving average of the weights, such as 0.999: after a step it is "
        "ema · average + (1 - ema) · weights. Every checkpoint has it. null: none.",
    )
    deterministic: Determinism = Field(
        default="strict",
        description="strict: a step that is computed again has the same bits; on accelerators "
        "torch uses only kernels that repeat them, and an operation without one is an error. fast: "
        "any kernel; on accelerators two runs may differ in their last bits, digests prove "
        "nothing, and replicas are not compared by them.",
    )

    @property
    def last_step(self) -> int:
        """The number of steps. Raises ValueError if it is not known yet."""
        if self.steps is None:
            raise ValueError("train.steps is not known before the sources are prepared")
        return self.steps


def _has_amount(given: Mapping[str, Any]) -> bool:
    return given.get("tokens") is not None or given.get("epochs") is not None
