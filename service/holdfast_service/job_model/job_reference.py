"""A job and a step, written as JOB or JOB/STEP. Pure; the command line reads it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobReference:
    """A job by id or name; `step` None: its newest checkpoint."""

    job: str
    step: int | None


def parse_job_reference(text: str) -> JobReference:
    """The reference written as JOB or JOB/STEP. Raises ValueError."""
    job, slash, step = text.partition("/")
    if not slash:
        return JobReference(job, None)
    if not (job and step.isascii() and step.isdigit() and len(step) < 16):
        raise ValueError(f"{text!r} is not a JOB or a JOB/STEP")
    return JobReference(job, int(step))
