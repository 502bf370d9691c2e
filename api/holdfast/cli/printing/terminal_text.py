"""Makes text of users harmless on a terminal. Pure.

Names, labels, messages and log lines come from other users, and from programs. A terminal would
obey what they contain: move the cursor, set the title, answer as if the user had typed. Overrides
of the direction show a text as another one.
"""

from __future__ import annotations

import re

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
# Moves, clears and modes; then titles, links and the clipboard; then sets of characters. None goes
# on over the opener of the next: a search for the end from each opener would take quadratic time.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"
)
_KEPT = "\n\t"
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REMOVED = dict.fromkeys(
    code
    for code in (*range(0x20), *range(0x7F, 0xA0), *_BIDI, *range(0xD800, 0xE000))
    if chr(code) not in _KEPT
)
_LINE_ENDS = str.maketrans(dict.fromkeys("\n\t\u2028\u2029", " "))
_RESET = "\x1b[0m"


def harmless(text: str) -> str:
    """The text without escape sequences, control characters and overrides of its direction; lines
    and tabs stay."""
    return _SEQUENCE.sub("", text).translate(_REMOVED)


def one_line(text: str) -> str:
    """The text without control characters, on one line: a name must not look like another row."""
    return harmless(text.translate(_LINE_ENDS))


def coloured(line: str) -> str:
    """A line of a program without control characters; its colours stay, and end with the line."""
    text = "".join(
        part if _COLOUR.fullmatch(part) else harmless(part) for part in _COLOUR.split(line)
    )
    return text + _RESET if _COLOUR.search(text) else text
