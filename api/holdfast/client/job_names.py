"""Which job a word means: an id, the beginning of one, or a name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from holdfast.errors import AmbiguousName, JobNotFound

SHORTEST_PREFIX = 13
"""Characters of an id in short: the time of its making, and nothing drawn by lot."""
SHOWN = 10
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Candidate(Protocol):
    """A job that a word may mean, as a row of a list."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def is_id(word: str) -> bool:
    """It is an id as it stands: nobody need be asked for it."""
    return _ID.fullmatch(word) is not None


def chosen(word: str, candidates: Iterable[CandidateT]) -> CandidateT:
    """The one job of that name, or else the one whose id begins so.

    Raises AmbiguousName with all that it could be, JobNotFound.
    """
    named, begun = list[CandidateT](), list[CandidateT]()
    for candidate in candidates:
        if candidate.id == word:
            return candidate
        if candidate.name == word:
            named.append(candidate)
        elif word and candidate.id.startswith(word):
            begun.append(candidate)
    fitting = named or begun
    if not fitting:
        detail = f"there is no job {word[:64]!r}: give a name, an id or the beginning of one"
        raise JobNotFound({"status": 404, "code": "job_not_found", "detail": detail})
    if len(fitting) > 1:
        raise _ambiguous(word, "are named" if named else "have an id that begins with", fitting)
    return fitting[0]


def short(ids: Sequence[str]) -> list[str]:
    """Each as short as still tells it from the others, and never shorter than its time."""
    length = SHORTEST_PREFIX
    distinct = len(set(ids))
    while length < 36 and len({entry[:length] for entry in ids}) < distinct:
        length += 1
    return [item[:length].rstrip("-") for item in ids]


def _ambiguous(word: str, how: str, fitting: Sequence[Candidate]) -> AmbiguousName:
    ids = [item.id for item in fitting]
    lines = [
        f"  {prefix}  {one.state:<10}  {one.name}"
        for prefix, one in zip(short(ids), fitting[:SHOWN], strict=False)
    ]
    if len(fitting) > SHOWN:
        lines.append(f"  and {len(fitting) - SHOWN} more")
    first = f"{len(fitting)} jobs {how} {word!r}; name one by the beginning of its id:"
    return AmbiguousName("\n".join([first, *lines]), ids)
