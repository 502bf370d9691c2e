"""The labels of jobs: their names, their texts, their number."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from holdfast_service.job_model.storable_text import UNSTORABLE, is_storable

MAX_LABELS = 16
LabelName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,31}$")]


def _storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError(f"the text {UNSTORABLE}")
    return text


LabelText = Annotated[str, Field(max_length=64), AfterValidator(_storable)]
