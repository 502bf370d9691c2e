"""Resolves the text that names a job: an id, the start or end of an id, or a job name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import AmbiguousName, JobNotFound

if TYPE_CHECKING:
    from holdfast_service.views.lists import JobRow

SHORT = 8
"""Characters of a shortened id: its end, which is random; its start is the creation time, which
jobs share that were created together."""
MAX_SHOWN = 10
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_id(word: str) -> bool:
    """Whether it is a complete id, which needs no request to the server."""
    return _ID.fullmatch(word) is not None


def resolve(word: str, candidates: Iterable[JobRow]) -> JobRow:
    """The only job with that name, or else the only job whose id starts with `word`, or ends with
    it if it has at least `SHORT` characters: a single digit ends the id of many a job.

    Raises AmbiguousName with all matches, JobNotFound.
    """
    by_name: list[JobRow] = []
    by_part: list[JobRow] = []
    for candidate in candidates:
        if candidate.id == word:
            return candidate
        if candidate.name == word:
            by_name.append(candidate)
        elif word and (candidate.id.startswith(word) or _is_end(word, candidate.id)):
            by_part.append(candidate)
    matches = by_name or by_part
    if not matches:
        detail = f"there is no job {word[:64]!r}: give a name, an id or the start or end of an id"
        raise JobNotFound(detail)
    if len(matches) > 1:
        raise _ambiguous(
            word, "are named" if by_name else "have an id that starts or ends with", matches
        )
    return matches[0]


def _is_end(word: str, job_id: str) -> bool:
    return len(word) >= SHORT and job_id.endswith(word)


def short(ids: Sequence[str]) -> list[str]:
    """The shortest ends that are distinct, each of at least `SHORT` characters."""
    length = SHORT
    distinct = len(set(ids))
    while length < 36 and len({job_id[-length:] for job_id in ids}) < distinct:
        length += 1
    return [job_id[-length:].lstrip("-") for job_id in ids]


def _ambiguous(word: str, relation: str, matches: Sequence[JobRow]) -> AmbiguousName:
    ids = [job.id for job in matches]
    lines = [
        f"  {short_id}  {job.state:<10}  {job.name}"
        for short_id, job in zip(short(ids), matches[:MAX_SHOWN], strict=False)
    ]
    if len(matches) > MAX_SHOWN:
        lines.append(f"  and {len(matches) - MAX_SHOWN} more")
    first = f"{len(matches)} jobs {relation} {word!r}; choose one by its id:"
    return AmbiguousName("\n".join([first, *lines]), ids)
