"""Which log lines are wanted: by rank, attempt, time, level and regular expression. Pure.

Expressions run on RE2, whose time grows with the text alone: no expression can hang a server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import re2

from holdfast_service.job_model.job_errors import InvalidRegex

LONGEST_REGEX = 500
REGEX_BYTES = 1 << 20
"""What a compiled expression may take."""


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_LEVELS = tuple(LogLevel)
_WORDS = {
    "DEBUG": LogLevel.DEBUG,
    "INFO": LogLevel.INFO,
    "WARN": LogLevel.WARNING,
    "WARNING": LogLevel.WARNING,
    "ERROR": LogLevel.ERROR,
    "CRITICAL": LogLevel.ERROR,
    "FATAL": LogLevel.ERROR,
}
_WORD = re.compile(r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_GLOG = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_GLOG_LEVELS = {
    "D": LogLevel.DEBUG,
    "I": LogLevel.INFO,
    "W": LogLevel.WARNING,
    "E": LogLevel.ERROR,
    "F": LogLevel.ERROR,
}
_RAISED = re.compile(r"Traceback \(most recent call last\)|[\w.]*(Error|Exception)\b(:|$)")
_HEAD = 160
"""Characters of a line in which its level stands, if it says one."""


def level_of(said: str) -> LogLevel | None:
    """The level that a line names itself, or that of an exception; None: it says nothing of it."""
    head = said[:_HEAD].lstrip()
    if _GLOG.match(head):
        return _GLOG_LEVELS[head[0]]
    if _RAISED.match(head):
        return LogLevel.ERROR
    found = _WORD.search(head)
    if found is None or (found[0].islower() and not _labels(head, found)):
        return None
    return _WORDS[found[0].upper()]


def _labels(head: str, found: re.Match[str]) -> bool:
    """Whether a word in small letters is a level rather than a part of what is said."""
    following = head[found.end() : found.end() + 1]
    before = head[: found.start()]
    return following in (":", "]", "=") or before.endswith(("level=", "["))


_NOT_BY_LINES = re.compile(r"\\[AzZQ]|\(\?\w*-")
"""What means another thing in one line than in many, or could."""
_ANCHORED = re.compile(r"[\^$]")


@dataclass(frozen=True)
class Expression:
    """A compiled one; `_joined`: for lines that are joined by line feeds."""

    _one: Any
    _joined: Any = None
    _anywhere: bool = False
    """Whether it means the same in the midst of other text, between two quotation marks."""

    def search(self, said: str) -> bool:
        return self._one.search(said) is not None

    def may_be_in(self, lines: Sequence[str]) -> bool:
        """False if it is certainly in none of them; found out at once for all, in a hundredth of
        the time that each by itself takes."""
        return self._joined is None or self._joined.search("\n".join(lines)) is not None

    def may_be_stored(self, stored: str) -> bool:
        """False if it is certainly in no line of `stored`, a chunk as JSON: found out without
        making lines of it, which takes most of the time of a search."""
        if not self._anywhere or "\\" in stored:  # a line may look otherwise there
            return True
        return self._one.search(stored) is not None


@dataclass(frozen=True)
class LogFilter:
    """What is None lets all through. `since`, `until`: Unix seconds; `level`: that or worse."""

    rank: int | None = None
    attempt: int | None = None
    since: float | None = None
    until: float | None = None
    level: LogLevel | None = None
    grep: Expression | None = None

    def lets_through(self, stored: list[Any]) -> bool:
        """`stored`: a line as `series.store_logs` keeps it."""
        at, rank, attempt, _, _, _, said = stored
        if self.rank is not None and rank != self.rank:
            return False
        if self.attempt is not None and attempt != self.attempt:
            return False
        if self.since is not None and at < self.since:
            return False
        if self.until is not None and at > self.until:
            return False
        if self.level is not None and not self._loud(said):
            return False
        return self.grep is None or self.grep.search(said)

    def _loud(self, said: str) -> bool:
        assert self.level is not None
        level = level_of(said)
        return level is not None and _LEVELS.index(level) >= _LEVELS.index(self.level)


def compiled(expression: str | None) -> Expression | None:
    """A regular expression in RE2's syntax. Raises InvalidRegex."""
    if expression is None:
        return None
    if len(expression) > LONGEST_REGEX:
        raise InvalidRegex(f"the expression has more than {LONGEST_REGEX} characters")
    options = re2.Options()
    options.max_mem = REGEX_BYTES
    options.log_errors = False
    try:
        one = re2.compile(expression, options)
        joined = None
        if not _NOT_BY_LINES.search(expression):
            joined = re2.compile(f"(?m)(?:{expression})", options)
        plain = joined is not None and not _ANCHORED.search(expression.replace("[^", "["))
        return Expression(one, joined, plain)
    except (re2.error, UnicodeError) as error:
        why = error.args[0] if error.args else error
        why = why.decode(errors="replace") if isinstance(why, bytes) else why
        raise InvalidRegex(f"{expression[:80]!r} is no regular expression: {why}") from error
