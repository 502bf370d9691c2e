"""Draws line plots in text: each character is a grid of 2 x 4 dots (braille). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800
TICKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class AxisRange:
    """The smallest and the largest value of an axis."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> AxisRange:
        """The range of the values, never empty: a constant is drawn in the middle."""
        low, high = min(values), max(values)
        if low == high:
            margin = abs(low) * 0.05 or 1.0
            return cls(low - margin, high + margin)
        return cls(low, high)

    def share(self, value: float) -> float:
        """The position of the value within the range: 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def draw_line(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """The line through `points` (x ascending) as `height` lines of text, the top line first."""
    across, down = width * 2, height * 4
    xs, ys = AxisRange.of([x for x, _ in points]), AxisRange.of([y for _, y in points])
    cells = [[BLANK] * width for _ in range(height)]
    dots = [
        (
            min(across - 1, int(xs.share(x) * (across - 1) + 0.5)),
            min(down - 1, int((1 - ys.share(y)) * (down - 1) + 0.5)),
        )
        for x, y in points
    ]
    for (x0, y0), (x1, y1) in zip([dots[0], *dots], dots, strict=False):
        for x, y in _between(x0, y0, x1, y1):
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(map(chr, row)).replace(chr(BLANK), " ").rstrip() for row in cells]


def chart(
    title: str, points: Sequence[tuple[float, float]], width: int, height: int = 8
) -> list[str]:
    """A plot with a title, two values on the left and two steps below; `width` in characters."""
    ys = AxisRange.of([y for _, y in points])
    labels = [label(ys.high), *[""] * (height - 2), label(ys.low)]
    margin = max(len(tick) for tick in labels)
    inner = max(10, width - margin - 2)
    lines = [
        f"{tick:>{margin}} ┤{row}"
        for tick, row in zip(labels, draw_line(points, inner, height), strict=True)
    ]
    first, last = f"{points[0][0]:g}", f"{points[-1][0]:g}"
    below = f"{'':>{margin}} └{first}{last:>{max(1, inner - len(first))}}"
    return [f"{'':>{margin}}  {title}", *lines, below]


def spark(values: Sequence[float], width: int) -> str:
    """The last `width` values as one line of ticks."""
    shown = values[-width:]
    if not shown:
        return ""
    span = AxisRange.of(shown)
    return "".join(TICKS[min(7, int(span.share(value) * 8))] for value in shown)


def label(value: float) -> str:
    """A value as the label of an axis."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _between(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    """Every dot of a straight line, both ends included."""
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps))
        for step in range(steps + 1)
    ]
