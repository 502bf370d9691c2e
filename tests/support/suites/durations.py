"""Where the time of a test run went: sums over the cases of JUnit files.

    python -m tests.support.suites.durations build/test-*.xml [--top 20] [--over 1.0]

Prints seconds by folder, by module, by mark and by fixture, and the longest tests. The seconds of a
test include the fixtures that were set up for it; a fixture's include those that it asked for by
name while it was set up.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.support.suites.recording import FIXTURE, MARKS, PROCESSOR_S


@dataclass(frozen=True)
class Case:
    """One test of one run. `processor_s` is that of the whole machine meanwhile."""

    module: str
    name: str
    seconds: float
    processor_s: float
    marks: tuple[str, ...]
    fixtures_s: dict[str, float]

    @property
    def folder(self) -> str:
        """E.g. "workers.training" of `tests.workers.training.test_step_loop`."""
        return ".".join(self.module.split(".")[1:3])


def read(path: Path) -> list[Case]:
    """The cases of a JUnit file that pytest wrote with the plug-in `recording`; an interrupted run
    leaves one without a name."""
    elements = ElementTree.parse(path).iter("testcase")
    return [_case(element) for element in elements if "classname" in element.attrib]


def _case(element: ElementTree.Element) -> Case:
    values = {
        item.attrib["name"]: item.attrib["value"] for item in element.findall("properties/property")
    }
    fixtures = {
        name.removeprefix(FIXTURE): float(value)
        for name, value in values.items()
        if name.startswith(FIXTURE)
    }
    return Case(
        module=element.attrib["classname"],
        name=element.attrib["name"].partition("@")[0],  # what follows is its group
        seconds=float(element.attrib["time"]),
        processor_s=float(values.get(PROCESSOR_S, 0.0)),
        marks=tuple(values.get(MARKS, "").split()) or ("no mark",),
        fixtures_s=fixtures,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sum the durations of tests.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--top", type=int, default=20, help="lines per table")
    parser.add_argument("--over", type=float, default=1.0, help="count tests longer than this")
    options = parser.parse_args(arguments)
    cases = [case for path in options.files for case in read(path)]
    long = [case for case in cases if case.seconds > options.over]
    print(
        f"{len(cases)} tests, {sum(case.seconds for case in cases):.0f} s; {len(long)} over "
        f"{options.over:g} s, {sum(case.seconds for case in long):.0f} s"
    )
    folders = ((case.folder, case.seconds) for case in cases)
    modules = ((case.module, case.seconds) for case in cases)
    marks = ((mark, case.seconds) for case in cases for mark in case.marks)
    fixtures = ((name, seconds) for case in cases for name, seconds in case.fixtures_s.items())
    tests = ((f"{case.module}::{case.name}", case.seconds) for case in cases)
    for title, seconds in (
        ("folder", folders),
        ("module", modules),
        ("mark", marks),
        ("fixture", fixtures),
        ("test", tests),
    ):
        _print_table(title, seconds, options.top)


def _print_table(title: str, seconds: Iterable[tuple[str, float]], top: int) -> None:
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, value in seconds:
        total[name] += value  # type: ignore[assignment]  # a counter of seconds
        count[name] += 1
    print(f"\nseconds  count  {title}")
    for name, value in total.most_common(top):
        print(f"{value:7.1f} {count[name]:6d}  {name}")


if __name__ == "__main__":
    main()
