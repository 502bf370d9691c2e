"""What the commands print: results on stdout (JSON if asked), everything else on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from holdfast.errors import HoldfastError, InvalidSpec
from holdfast_service.lifecycle import State

STATE_STYLES = {
    State.RUNNING: "green",
    State.SUCCEEDED: "bold green",
    State.FAILED: "bold red",
    State.RECOVERING: "yellow",
    State.CANCELLING: "magenta",
    State.CANCELLED: "magenta",
}


WIDE = 200  # columns where no terminal says how many there are: nothing is cut off in a pipe


def console() -> Console:
    width = None if sys.stdout.isatty() else WIDE
    return Console(highlight=False, soft_wrap=True, width=width)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on one line, at once: a reader may be waiting for it."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    sys.stdout.write(json.dumps(plain) + "\n")
    sys.stdout.flush()


def print_error(error: HoldfastError) -> None:
    out = stderr()
    summary = error.summary if isinstance(error, InvalidSpec) else error
    out.print(Text.assemble(("error", "bold red"), f" ({error.code}): {summary}"))
    if isinstance(error, InvalidSpec):
        for fault in error.faults:
            out.print(
                Text.assemble("  ", (fault["path"] or "spec", "bold"), f": {fault['message']}")
            )


def state_text(state: State) -> Text:
    return Text(state.value, style=STATE_STYLES.get(state, ""))


def seconds(value: float | None) -> str:
    """A duration for people: 0.134 s, 12.1 s, 3 min 20 s."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value:.3f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def ago(at: float | None) -> str:
    return "-" if at is None else f"{seconds(max(0.0, time.time() - at))} ago"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
