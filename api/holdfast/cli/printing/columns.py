"""Lays out rows in columns that fit a given width, or without a limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from holdfast.cli.printing.terminal_text import one_line

GAP = 2
ELLIPSIS = "…"


@dataclass(frozen=True)
class Column:
    heading: str
    right: bool = False
    """Aligned to the right, for numbers."""
    least: int | None = None
    """Smallest width if the table is too wide; None: the column is never cut."""
    drop: int = 0
    """Left out if the table is still too wide, the largest number first; 0: never."""


def lay(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], width: int | None) -> Text:
    """The heading and the rows as lines. `width` in terminal cells; None: no limit."""
    texts = [[_text(cell) for cell in row] for row in rows]
    kept = list(range(len(columns)))
    widths = [
        max([len(column.heading), *(row[index].cell_len for row in texts)])
        for index, column in enumerate(columns)
    ]
    if width is not None:
        kept = _fitted(columns, widths, width)
    rows_of_text = [[Text(column.heading, style="bold") for column in columns], *texts]
    lines = [
        _line([(row[index], widths[index], columns[index].right) for index in kept])
        for row in rows_of_text
    ]
    return Text("\n").join(lines)


def _fitted(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Cut `widths` until the columns fit. Returns the indices of the columns that are kept."""
    kept = list(range(len(columns)))
    droppable = sorted(
        (index for index in kept if columns[index].drop), key=lambda index: columns[index].drop
    )
    while True:
        excess = sum(widths[index] for index in kept) + GAP * (len(kept) - 1) - width
        if excess <= 0:
            return kept
        spare = {
            index: widths[index] - least
            for index in kept
            if (least := columns[index].least) is not None
        }
        if sum(max(0, cells) for cells in spare.values()) >= excess:
            _cut(widths, spare, excess)
            return kept
        if not droppable:
            _cut(widths, spare, excess)
            return kept
        kept.remove(droppable.pop())


def _cut(widths: list[int], spare: dict[int, int], excess: int) -> None:
    """Take cells one by one from the widest column that has spare cells."""
    while excess > 0:
        candidates = [index for index, cells in spare.items() if cells > 0]
        if not candidates:
            return
        widest = max(candidates, key=lambda index: widths[index])
        widths[widest] -= 1
        spare[widest] -= 1
        excess -= 1


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
    return cut.append(ELLIPSIS)


def _text(cell: str | Text) -> Text:
    return Text(one_line(cell)) if isinstance(cell, str) else cell
