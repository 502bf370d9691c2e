"""The labels of jobs (their names, texts, number), and their priorities."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from holdfast_service.job_model.storable_text import UNSTORABLE, is_storable

MAX_LABELS = 16
Priority = Annotated[int, Field(ge=-1000, le=1000)]
LabelName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,31}$")]


def _storable(text: str) -> str:
    if not is_storable(text):
        raise ValueError(f"the text {UNSTORABLE}")
    return text


LabelText = Annotated[str, Field(max_length=64), AfterValidator(_storable)]
