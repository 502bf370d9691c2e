"""Prints for all commands: results to stdout (JSON or YAML on request); progress and errors go to
stderr.

If stdout is not a terminal, there is no colour and no line is cut: programs read it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from holdfast.cli.common import Format, Options
from holdfast.cli.printing.columns import Column, lay
from holdfast.cli.printing.terminal_text import harmless
from holdfast.client.job_names import short
from holdfast.errors import ApiError, HoldfastError
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.start_text import is_start
from holdfast_service.wording import duration

PLAIN_EVERY_S = 10.0
"""Between two lines about what a command waits for, where stderr is no terminal."""

if TYPE_CHECKING:
    from holdfast_service.views.jobs import JobView
    from holdfast_service.views.lists import JobRow

STATE_STYLES = {
    State.RUNNING: "green",
    State.SUCCEEDED: "bold green",
    State.FAILED: "bold red",
    State.RECOVERING: "yellow",
    State.RESIZING: "yellow",
    State.CANCELLING: "magenta",
    State.CANCELLED: "magenta",
    State.PAUSING: "cyan",
    State.PAUSED: "cyan",
}


TRACEBACK_VARIABLE = "HOLDFAST_TRACEBACK"
WIDE = 200  # columns if there is no terminal: no line is cut in a pipe
BLOCKS = " ▏▎▍▌▋▊▉█"
NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")
"""A node id of Ray."""
MIN_NODE_ID_DIGITS = 8


class TextConsole(Console):
    """Prints text as it is: nothing in it is markup, and nothing in it reaches the terminal that is
    not text. Only this program's own styles do."""

    def __init__(self, *, soft_wrap: bool = True, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            shown = segment.control or segment.text.isprintable()
            yield segment if shown else segment._replace(text=harmless(segment.text))


def console() -> Console:
    return TextConsole(width=None if sys.stdout.isatty() else WIDE)


def stderr() -> Console:
    return TextConsole(stderr=True)


def width() -> int | None:
    """Columns of the terminal; None if stdout is not a terminal."""
    return console().width if sys.stdout.isatty() else None


def fold(line: Text, indent: int) -> Text:
    """The line, wrapped to the width of the terminal; continuation lines are indented, also those
    of a text that has several."""
    cells = width()
    if cells is None:
        lines = line.split("\n", allow_blank=True)
    elif "\n" in line.plain or line.cell_len > cells:
        lines = line.wrap(console(), cells - indent)
    else:
        return line
    return Text("\n" + " " * indent).join(lines)


def steps(step: int | None, steps: int | None) -> str:
    """`41/300`, `41` if the number of steps is not known, or `-` if no step is."""
    if steps is None:
        return "-" if step is None else str(step)
    return f"{step or 0}/{steps}"


def row_steps(row: JobRow) -> str:
    """The steps of a job in a list, or that its present attempt has not made one yet."""
    if is_start(row.waiting):
        return f"attempt {row.attempt} starts" if row.attempt else "starts"
    return steps(row.step, row.steps)


def has_steps(job: JobView) -> bool:
    """Whether the job's step is known."""
    return job.progress.step is not None


def progress_bar(step: int | None, steps: int | None, cells: int) -> str:
    """The part that is done; empty if the number of steps is not known."""
    return bar((step or 0) / max(1, steps), cells) if steps is not None else " " * cells


def result(options: Options, value: Any) -> bool:
    """Print the value as a document, if the options request documents; else print nothing and
    return False."""
    if options.plain:
        print_yaml(value) if options.form is Format.YAML else print_json(value)
    return options.plain


def results(options: Options, values: Iterable[Any]) -> bool:
    """Print the values, if the options request documents, each as soon as it is known; else print
    nothing and return False. JSON: one array, whole also after Ctrl-C; JSON lines and YAML: a
    document each."""
    if options.form is not Format.JSON:
        return options.plain and all(result(options, value) for value in values)
    sys.stdout.write("[")
    separator = ""
    try:
        for value in values:
            sys.stdout.write(separator + "\n" + json.dumps(_plain(value)))
            sys.stdout.flush()
            separator = ","
    finally:
        sys.stdout.write("\n]\n" if separator else "]\n")
        sys.stdout.flush()
    return True


def print_json(value: Any) -> None:
    """Print one JSON document on one line, and flush: a reader may wait for it."""
    sys.stdout.write(json.dumps(_plain(value)) + "\n")
    sys.stdout.flush()


def print_yaml(value: Any) -> None:
    """Print one YAML document, separated from the previous one."""
    from holdfast.formats import documents  # late: few commands need it

    sys.stdout.write("---\n" + documents.write_yaml(_plain(value)))
    sys.stdout.flush()


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, whole: bool = False
) -> None:
    """Print a table that fits the terminal; `whole`: without cutting."""
    console().print(lay(columns, rows, None if whole else width()))


def progress(*lines: str | Text) -> None:
    """Print lines for the user to stderr."""
    out = stderr()
    for line in lines:
        out.print(line)


@contextmanager
def changing_line() -> Iterator[Callable[[str | Text], None]]:
    """What a command waits for, on stderr: one line that changes; where that is no terminal, a line
    at times."""
    out, last = stderr(), -PLAIN_EVERY_S

    def print_at_times(line: str | Text) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            out.print(line)

    if not out.is_terminal:
        yield print_at_times
        return
    with out.status("") as status:
        yield status.update


def print_error(error: HoldfastError) -> None:
    out = stderr()
    summary = error.summary if isinstance(error, ApiError) else error
    out.print(Text.assemble(("error", "bold red"), f" ({error.code}): {summary}"))
    if isinstance(error, ApiError):
        for fault in error.faults:
            out.print(
                Text.assemble("  ", (fault["path"] or "spec", "bold"), f": {fault['message']}")
            )


def print_unforeseen(error: Exception) -> None:
    """Print an unexpected exception; its traceback only if HOLDFAST_TRACEBACK is set."""
    if os.environ.get(TRACEBACK_VARIABLE):
        stderr().print("".join(traceback.format_exception(error)))
    message = " ".join(str(error).split()) or "without a message"
    progress(
        f"error (unforeseen): {type(error).__name__}: {message}",
        f"this is a bug of holdfast, please report it; {TRACEBACK_VARIABLE}=1 prints a traceback",
    )


def ids(whole: Sequence[str], *, wide: bool = False) -> list[str]:
    """Job ids for display: on a terminal the shortest distinct prefixes, else whole."""
    return list(whole) if wide or not sys.stdout.isatty() else short(whole)


Shortener = Callable[[str], str]
"""Cuts the node ids in a text."""


class NodeIdShortener:
    """Cuts the node ids in a text to their first digits: as many as distinguish all node ids that
    it has seen, at least 8. Other names of nodes (host names, addresses) stay whole."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        self._digits = MIN_NODE_ID_DIGITS
        for text in texts:
            self._learn(text)

    def __call__(self, text: str) -> str:
        self._learn(text)
        return NODE_ID.sub(lambda found: found[0][: self._digits], text)

    def _learn(self, text: str) -> None:
        new = set(NODE_ID.findall(text)) - self._known
        self._known |= new
        while new and len({node_id[: self._digits] for node_id in self._known}) < len(self._known):
            self._digits += 1


def state_text(state: State) -> Text:
    return Text(state.value, style=STATE_STYLES.get(state, ""))


def bar(share: float, cells: int) -> str:
    """A bar of `cells` characters, with a resolution of an eighth."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    whole, rest = divmod(eighths, 8)
    return (BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")).ljust(cells)


def seconds(value: float | None) -> str:
    """A duration as text: 0.134 s, 12.1 s, 3 min 20 s."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value:.3f} s"
    return duration(value)


def brief(value: float | None) -> str:
    """A duration in a table: 8s, 12m, 3h05, 2d04h."""
    if value is None:
        return "-"
    whole = round(value)
    if whole < 120:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60:02}"
    return f"{days}d{hours % 24:02}h"


def count(value: float | None) -> str:
    """A large number in a table: 950, 12.3k, 4.56M."""
    if value is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.0f}"


def ago(at: float | None) -> str:
    return "-" if at is None else f"{seconds(max(0.0, time.time() - at))} ago"


def age(at: float | None) -> str:
    return "-" if at is None else brief(max(0.0, time.time() - at))


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
