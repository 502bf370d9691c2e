"""Lays rows out in columns that fit a terminal, or whole where there is none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

GAP = 2
DOTS = "…"


@dataclass(frozen=True)
class Column:
    heading: str
    right: bool = False
    """Numbers stand to the right."""
    least: int | None = None
    """It may be cut to so many cells where room is short; None: never."""
    drop: int = 0
    """Left out where room is still short, the largest first; 0: never."""


def lay(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int | None) -> Text:
    """Heading and rows as lines. `width` in cells; None: as wide as it gets."""
    texts = [[_text(cell) for cell in row] for row in rows]
    kept = list(range(len(columns)))
    widths = [
        max([len(column.heading), *(row[at].cell_len for row in texts)])
        for at, column in enumerate(columns)
    ]
    if width is not None:
        kept = _fitted(columns, widths, width)
    lines = [[Text(columns[at].heading, style="bold") for at in range(len(columns))], *texts]
    laid = [_line([(row[at], widths[at], columns[at].right) for at in kept]) for row in lines]
    return Text("\n").join(laid)


def _fitted(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Cut `widths` until the columns fit; which columns are left."""
    kept = list(range(len(columns)))
    droppable = sorted((at for at in kept if columns[at].drop), key=lambda at: columns[at].drop)
    while True:
        over = sum(widths[at] for at in kept) + GAP * (len(kept) - 1) - width
        if over <= 0:
            return kept
        room = {at: widths[at] - least for at in kept if (least := columns[at].least) is not None}
        if sum(max(0, free) for free in room.values()) >= over:
            _cut(widths, room, over)
            return kept
        if not droppable:
            _cut(widths, room, over)
            return kept
        kept.remove(droppable.pop())


def _cut(widths: list[int], room: dict[int, int], over: int) -> None:
    """Take cells from the widest of the columns that have room, one by one."""
    while over > 0:
        able = [at for at, free in room.items() if free > 0]
        if not able:
            return
        widest = max(able, key=lambda at: widths[at])
        widths[widest] -= 1
        room[widest] -= 1
        over -= 1


def _line(cells: Sequence[tuple[Text, int, bool]]) -> Text:
    line = Text()
    for number, (cell, width, right) in enumerate(cells):
        cut = _cut_text(cell, width)
        space = " " * (width - cut.cell_len)
        last = number == len(cells) - 1
        line.append_text(Text.assemble(space, cut) if right else cut)
        if not last:
            line.append((" " * GAP) if right else space + " " * GAP)
    return line


def _cut_text(cell: Text, width: int) -> Text:
    if cell.cell_len <= width:
        return cell
    cut = cell.copy()
    cut.truncate(max(0, width - 1))
    return cut.append(DOTS)


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
