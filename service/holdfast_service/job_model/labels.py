"""The labels of jobs (their names, texts, number), and their priorities."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast_service.job_model.storable_text import StorableText

MAX_LABELS = 16
Priority = Annotated[int, Field(ge=-1000, le=1000)]
LabelName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9._-]{0,31}$")]
LabelText = Annotated[StorableText, Field(max_length=64)]
