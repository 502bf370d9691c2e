"""The exception that ended a program, in the file format of `torch.distributed.elastic`.

`@record` of torch writes such a file to the path in `TORCHELASTIC_ERROR_FILE`. A forked script that
does not use it gets the same file from its launcher's side of the fork.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_workers.ipc.control_channel import MAX_TEXT, shorten_middle
from holdfast_workers.protocol.messages import ErrorKind

MAX_BYTES = 64 << 20
MOST_CHARACTERS = 500
"""Characters of a line that are kept, from both of its ends."""
_RANK_MARK = re.compile(r"^\[rank\d+\]: ")
"""torch puts it before the lines of a traceback once there is a process group."""
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")


@dataclass(frozen=True)
class RecordedError:
    """An exception as the file describes it."""

    type: str
    message: str
    traceback: str


_MEMORY_ERRORS = {
    "PayloadDamaged": ErrorKind.DAMAGED,
    "StateMissing": ErrorKind.RESTORE,
    "PeerFailed": ErrorKind.COMMUNICATION,
}
"""Errors of memory checkpoints, by the names of their classes: a program's output has no more."""


_DIST_ERROR = re.compile(r"Dist(Backend|Network|Store)?Error")
_RAISED_DIST_ERROR = re.compile(rf"^([\w.]+\.)?{_DIST_ERROR.pattern}\b", re.MULTILINE)
_OF_TRANSPORT = "RuntimeError: "
"""An error of a transport: C++ raises it, so that no `raise` statement of a program is shown."""
_FRAME, _IN_TORCH = "  File ", "/torch/"
_RAISE = re.compile(r"^\s+raise\b")
_BETWEEN_RANKS = re.compile(r"gloo|NCCL|TCPStore|c10d", re.IGNORECASE)
_CONNECTION_FAULT = re.compile(
    r"connection|socket|broken pipe|time(d )?out|peer|remote process|network", re.IGNORECASE
)


def kind_of(error: RecordedError) -> ErrorKind:
    """The kind of error that the supervisor sees in `error`."""
    other = ErrorKind.COMMUNICATION if blames_a_peer(error) else ErrorKind.USER
    return _MEMORY_ERRORS.get(error.type, other)


def blames_a_peer(error: RecordedError) -> bool:
    """Whether the cause lies with another rank or the rendezvous store: an exception of
    `torch.distributed`, or one that C++ raised in one of its transports, about a connection. What
    the program raises itself is its own affair, whatever its text says."""
    text = shorten(error.traceback) or f"{error.type}: {error.message}"
    if _DIST_ERROR.fullmatch(error.type) or _RAISED_DIST_ERROR.search(text):
        return True
    is_raised = in_torch = False
    tells: list[str] = []
    for line in text.splitlines():
        if line.startswith(_FRAME):
            is_raised, in_torch = False, _IN_TORCH in line
        elif line.startswith(" "):  # a line of code
            is_raised = is_raised or (_RAISE.match(line) is not None and not in_torch)
        elif (not error.type or line.startswith(_OF_TRANSPORT)) and not is_raised:
            tells.append(line)
    return any(_BETWEEN_RANKS.search(line) and _CONNECTION_FAULT.search(line) for line in tells)


def write(path: Path, error: BaseException) -> None:
    """Record `error`, unless `@record` has done so already. Raises OSError."""
    if path.exists():
        return
    recorded = {
        "message": f"{type(error).__name__}: {shorten_middle(_text_of(error))}",
        "extraInfo": {
            "py_callstack": shorten("".join(traceback.format_exception(error))),
            "timestamp": str(int(time.time())),
        },
    }
    path.write_text(json.dumps({"message": recorded}))


def _text_of(error: BaseException) -> str:
    """Its message; a class of the program may fail to give one."""
    try:
        return str(error)
    except Exception as why:
        return f"<its message cannot be shown: {type(why).__name__}>"


def shorten(text: str) -> str:
    """A traceback that fits into a message: long lines without their middle; if it is still too
    long, without the middle of what follows the type of its last exception."""
    lines = [short_line(line) for line in text.splitlines()]
    begins = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    whole = "\n".join(lines)
    if len(whole) <= MAX_TEXT or not begins:
        return shorten_middle(whole)
    frames = range(begins[-1] + 1, len(lines))
    raised = next((at for at in frames if not lines[at].startswith(" ")), len(lines) - 1)
    known = shorten_middle("\n".join(lines[begins[-1] : raised + 1]))
    left = MAX_TEXT - len(known)
    return f"{known}\n…\n{whole[-left:]}" if left > 0 else known


def short_line(line: str) -> str:
    """A line without its middle, if it is long."""
    half = MOST_CHARACTERS // 2
    return line if len(line) <= MOST_CHARACTERS else f"{line[:half]} … {line[-half:]}"


def of_output(ending: str, output: str) -> RecordedError:
    """The error that a program's last lines show for its end by `ending`: the exception of the last
    Python traceback in them, or the last line."""
    lines = _lines_of(output)
    begins = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    for index, line in enumerate(lines[begins[-1] + 1 :] if begins else (), 1):
        if not line.startswith(" ") and (named := _EXCEPTION.fullmatch(line)) is not None:
            text = "\n".join(lines[begins[-1] : begins[-1] + index + 1])
            return RecordedError(named[1].rpartition(".")[2], named[2] or "", text)
    last = _last_of(lines)
    message = f"the program ended with {ending}"
    kept = "\n".join(lines)
    return RecordedError("", f"{message}: {last}" if last else message, kept)


def _lines_of(output: str) -> list[str]:
    return [_RANK_MARK.sub("", line) for line in output.splitlines()]


def _last_of(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "")


def of_threads(output: str) -> RecordedError:
    """The error of a program that was ended because threads kept its process, where its exit code
    is not known: it may have failed. `output`: its last lines."""
    text = (
        "its main program has ended, and threads kept its process; its exit code is not known: "
        "make them daemon threads, or join them"
    )
    lines = _lines_of(output)
    last = _last_of(lines)
    message = f"{text}; the last line of its output: {last}" if last else text
    return RecordedError("ThreadsRemain", message, "\n".join(lines))


def read(path: Path) -> RecordedError | None:
    """The recorded error; None if there is none, or if the file is damaged."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return None
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, str):  # as written by a process that crashed
        return RecordedError("", message, "")
    if not isinstance(message, dict):
        return None
    return _of_document(message)


def _of_document(message: dict[str, Any]) -> RecordedError:
    text, extra = str(message.get("message", "")), message.get("extraInfo")
    callstack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    name, colon, rest = text.partition(": ")
    is_named = bool(colon) and name.replace(".", "").replace("_", "").isalnum()
    return RecordedError(
        type=name if is_named else "",
        message=rest if is_named else text,
        traceback=str(callstack),
    )
