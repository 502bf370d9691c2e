"""What a job reads of the sources in its spec: the response model, made of stored records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from holdfast_service.views.view import View
from holdfast_workers.spec import DataSpec


class DataReadView(View):
    """What a job with prepared `data.sources` reads."""

    tokenizer: str = Field(description="its size, digest and special tokens, in a line")


def data_read(spec: Mapping[str, Any]) -> DataReadView | None:
    """Of a stored spec. None: the job has no token sets, or its section is of another version."""
    section = spec.get("data") or {}
    if not section.get("prepared"):
        return None
    try:
        data = DataSpec.model_validate(section)
    except ValidationError:
        return None
    return DataReadView(tokenizer=_tokenizer_text(data))


def _tokenizer_text(data: DataSpec) -> str:
    digest = data.prepared[0].tokenizer
    parts = [f"{data.tokenizer}, {data.vocabulary:,} tokens"]
    parts += [f"digest {digest}"] if digest else []
    parts += [
        f"{role} {special.id}" if special.token is None else f"{role} {special.token} {special.id}"
        for role, special in data.special_tokens.items()
    ]
    return ", ".join(parts)
