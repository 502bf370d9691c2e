"""A line drawn in characters: each is a grid of 2 x 4 dots (braille). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800
TICKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Span:
    """From the least to the largest value that is shown."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        """Never empty: a constant is drawn in the middle."""
        low, high = min(values), max(values)
        if low == high:
            room = abs(low) * 0.05 or 1.0
            return cls(low - room, high + room)
        return cls(low, high)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def drawn(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """The line through `points` (x ascending) on so many characters, the top one first."""
    across, down = width * 2, height * 4
    xs, ys = Span.of([x for x, _ in points]), Span.of([y for _, y in points])
    cells = [[BLANK] * width for _ in range(height)]
    at = [
        (
            min(across - 1, int(xs.share(x) * (across - 1) + 0.5)),
            min(down - 1, int((1 - ys.share(y)) * (down - 1) + 0.5)),
        )
        for x, y in points
    ]
    for (x0, y0), (x1, y1) in zip([at[0], *at], at, strict=False):
        for x, y in _between(x0, y0, x1, y1):
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(map(chr, row)).replace(chr(BLANK), " ").rstrip() for row in cells]


def chart(
    title: str, points: Sequence[tuple[float, float]], width: int, height: int = 8
) -> list[str]:
    """`points` with a title, two values on the left and two steps below; `width` in characters."""
    ys = Span.of([y for _, y in points])
    labels = [label(ys.high), *[""] * (height - 2), label(ys.low)]
    margin = max(len(item) for item in labels)
    inner = max(10, width - margin - 2)
    lines = [
        f"{one:>{margin}} ┤{row}"
        for one, row in zip(labels, drawn(points, inner, height), strict=True)
    ]
    first, last = f"{points[0][0]:g}", f"{points[-1][0]:g}"
    below = f"{'':>{margin}} └{first}{last:>{max(1, inner - len(first))}}"
    return [f"{'':>{margin}}  {title}", *lines, below]


def spark(values: Sequence[float], width: int) -> str:
    """The last `width` values as one line of ticks."""
    shown = values[-width:]
    if not shown:
        return ""
    span = Span.of(shown)
    return "".join(TICKS[min(7, int(span.share(value) * 8))] for value in shown)


def label(value: float) -> str:
    """A value at an axis, in a few characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Those that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _between(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    """Every dot of the straight line, ends included."""
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * at / steps), y0 + round((y1 - y0) * at / steps))
        for at in range(steps + 1)
    ]
