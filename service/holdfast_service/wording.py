"""The words that all sentences share: lists, ranks, durations. Pure, and light to import: the help
of the commands loads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SHOWN_RANGES = 8


def sentence(text: str) -> str:
    """Starts with a capital letter, unless the first word is an identifier, and ends with a full
    stop."""
    stripped = " ".join(text.split())
    first, _, _ = stripped.partition(" ")
    capital = stripped[:1].upper() if first.isalpha() and first.islower() else stripped[:1]
    end = "" if stripped.endswith((".", "!", "?")) else "."
    return f"{capital}{stripped[1:]}{end}"


def enumeration(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[:-1] else []), *parts[-1:]])


def plural(count: float, noun: str, several: str = "") -> str:
    """`1 CPU`, `0.5 CPUs`, `3 nodes`. `several`: the plural of a noun that takes no `s`."""
    shown = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{shown} {noun}" if count == 1 else f"{shown} {several or f'{noun}s'}"


def shortened(items: Sequence[object], most: int = 8) -> str:
    """`0, 1`, or `0, 1, ... (64 in all)`: the first ones, at most `most`."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown}, ... ({len(items)} in all)" if len(items) > most else shown


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0 to 7, 12 and 16 to 23`."""
    numbers = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in numbers:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts: list[str] = []
    for run in ranges:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(parts) > SHOWN_RANGES:
        parts = [*parts[: SHOWN_RANGES - 1], f"others ({len(numbers)} in all)"]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {enumeration(parts)}"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """`dp_shard 4 × tp 2`."""
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


def duration(seconds: float) -> str:
    """`134 ms`, `12.1 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def device_time(device_s: float) -> str:
    """`42 device-seconds`, `1.24 device-hours`: hours of a short job would all be 0.00. What is
    not nothing is never 0.0."""
    if device_s >= 3600:
        return f"{device_s / 3600:.2f} device-hours"
    if 0 < device_s < 0.1:
        return f"{device_s:.1g} device-seconds"
    return f"{device_s:.{0 if device_s >= 10 else 1}f} device-seconds"


def device_share(part_s: float, whole_s: float) -> str:
    """`12 of 340 device-seconds`, `42 device-seconds of 17.78 device-hours`."""
    part, whole = device_time(part_s), device_time(whole_s)
    if 360 <= part_s < 3600 <= whole_s:
        part = f"{part_s / 3600:.2f} device-hours"
    amount, _, unit = part.partition(" ")
    return f"{amount} of {whole}" if whole.endswith(unit) else f"{part} of {whole}"
