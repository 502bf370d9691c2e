"""Configures structlog for a process: one line per event, in the logs' format.

Each entry point calls `configure` once: the API server, the process of a node agent, a zygote
(whose forks inherit the configuration), a supervisor, the keeper of the embedded cluster. It sets
structlog's process-wide configuration and does nothing else: it starts no thread, keeps no open
file and leaves `logging` alone, so a configured process may be forked. Importing this module
configures nothing.

Events go to the current `sys.stderr`:

- as text, in the format of a rank's log lines: `WARNING event key=value ...`. The service parses
  the level of a stored line from this word. The traceback of an exception follows on lines of its
  own.
- as JSON, where logs are collected: an object of `at` (Unix seconds), `level`, `event`, the fields
  of the process and those of the event that are not None; the traceback is `exception`.

A line that cannot be written is dropped: training never waits for a log.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

LEVEL_WIDTH = 7
"""Characters of the longest usual level, so that messages line up."""


def configure(*, timestamps: bool = False, json_fields: Mapping[str, object] | None = None) -> None:
    """Write this process's events to its standard error, as text or, with `json_fields`, as JSON
    objects that contain those fields.

    `timestamps`: text lines begin with the time in UTC; for a process whose output is stored
    without one. The agent stamps the lines of its children as they arrive.
    """
    import structlog  # late: it brings asyncio, which most importers of this module never need

    render: Processor
    if json_fields is not None:
        render = _json_renderer(json_fields)
    else:
        render = _timestamped_text if timestamps else _text
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        logger_factory=lambda *_names: _StandardError(),
        cache_logger_on_first_use=False,
    )


class _StandardError:
    """The logger at the end of structlog's chain. Looks `sys.stderr` up for each line: a zygote's
    child replaces it after the fork."""

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream closed
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


def _text(_logger: Any, _method: str, event: EventDict) -> str:
    level, message = str(event.pop("level")).upper(), event.pop("event")
    trace = event.pop("exception", None)
    fields = "".join(f" {name}={value}" for name, value in event.items())
    line = f"{level:<{LEVEL_WIDTH}} {message}{fields}"
    return _harmless(line if trace is None else f"{line}\n{trace}")


def _harmless(text: str) -> str:
    """The text with its control characters escaped, which a terminal would obey; lines and tabs
    stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in text
    )


def _timestamped_text(logger: Any, method: str, event: EventDict) -> str:
    now = datetime.now(UTC).isoformat(sep=" ", timespec="milliseconds")
    return f"{now} {_text(logger, method, event)}"


def _json_renderer(fields: Mapping[str, object]) -> Processor:
    def render(_logger: Any, _method: str, event: EventDict) -> str:
        level, message = event.pop("level"), event.pop("event")
        known = {name: value for name, value in event.items() if value is not None}
        return _json_line({"at": time.time(), "level": level, "event": message, **fields, **known})

    return render


def _json_line(entry: Mapping[str, Any]) -> str:
    """`entry` as one line of strict JSON; `at` stays a number."""
    try:
        return json.dumps(entry, default=str, separators=(",", ":"), allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity: write every value as text
        texts = {name: str(value) for name, value in entry.items()}
        return json.dumps({**texts, "at": entry["at"]}, separators=(",", ":"))
