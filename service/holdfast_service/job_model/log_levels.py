"""The level of a log line, read from its text. Pure; the client uses it too."""

from __future__ import annotations

import re
from enum import StrEnum


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_LEVEL_OF_WORD = {
    "DEBUG": LogLevel.DEBUG,
    "INFO": LogLevel.INFO,
    "WARN": LogLevel.WARNING,
    "WARNING": LogLevel.WARNING,
    "ERROR": LogLevel.ERROR,
    "CRITICAL": LogLevel.ERROR,
    "FATAL": LogLevel.ERROR,
}
_LEVEL_WORD = re.compile(r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_GLOG = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_GLOG_LEVELS = {
    "D": LogLevel.DEBUG,
    "I": LogLevel.INFO,
    "W": LogLevel.WARNING,
    "E": LogLevel.ERROR,
    "F": LogLevel.ERROR,
}
_EXCEPTION = re.compile(r"Traceback \(most recent call last\)|[\w.]*(Error|Exception)\b(:|$)")
_HEAD_LENGTH = 160
"""Number of leading characters of a line that are searched for its level."""


def level_of(text: str) -> LogLevel | None:
    """The level that a log line states, or ERROR for an exception; None: the line has no level."""
    head = text[:_HEAD_LENGTH].lstrip()
    if _GLOG.match(head):
        return _GLOG_LEVELS[head[0]]
    if _EXCEPTION.match(head):
        return LogLevel.ERROR
    found = _LEVEL_WORD.search(head)
    if found is None or (found[0].islower() and not _is_label(head, found)):
        return None
    return _LEVEL_OF_WORD[found[0].upper()]


def _is_label(head: str, found: re.Match[str]) -> bool:
    """Whether a lower-case word is the line's level, and not a word of its message."""
    following = head[found.end() : found.end() + 1]
    before = head[: found.start()]
    return following in (":", "]", "=") or before.endswith(("level=", "["))
