"""Batches of token ids beside steps that compute, in turns: Holdfast's and its peers', each in a
process of its own. All read the same windows, from files that are in the page cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.conditions import ROOT, BenchmarkFailed, environment, report
from benchmarks.data_parts import windows
from benchmarks.data_parts.holdfast_side import SPEC, put_into_cache
from benchmarks.data_parts.preparing import Prepared
from benchmarks.data_parts.read_loop import LoopFigures
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.data.token_set import read_shard
from holdfast_workers.spec import DataSpec, PreparedSpec, TrainingSpec

HOLDFAST = "holdfast"
SETTINGS = {
    HOLDFAST: ("read ahead",),
    "arrow": ("rows, 2 workers", "batches, 0 workers", "batches, 1 worker", "batches, 2 workers"),
    "mosaic": ("0 workers", "1 worker", "2 workers"),
}
"""Of each side's `epochs`; Holdfast has one."""
_PROCESS_S = 600.0
_TRIAL_PART = 4
"""A trial of a setting has one of so many parts of the steps."""


@dataclass(frozen=True)
class ReadOptions:
    """The steps, the same on all sides."""

    sequence_length: int
    batch: int
    warm_up: int
    steps: int
    step_s: float
    rounds: int


@dataclass(frozen=True)
class SideReading:
    """Medians over the rounds."""

    setting: str
    stall_share: float
    """Of the time of the steps, of which the step waits for its batch."""
    greatest_stall_share: float
    """Of a round."""
    tokens_per_processor_s: float
    batch_ms: float
    """Processor time of a batch."""


@dataclass(frozen=True)
class Reading:
    ratio: float | None
    """Tokens per second of processor time, ours by the better peer's. None: without peers."""
    sides: dict[str, SideReading]
    windows: int
    """Whole ones: those that all sides read."""


def measure(
    prepared: Prepared,
    data: DataSpec,
    pythons: Mapping[str, str],
    options: ReadOptions,
    folder: Path,
) -> Reading:
    """`pythons`: the interpreter of each peer. Raises BenchmarkFailed if sides read other ids."""
    folder.mkdir()
    write(prepared, data, options, folder)
    readers = {side: _Reader(side, python, folder) for side, python in pythons.items()}
    for reader in readers.values():
        reader.write()
    readers = {HOLDFAST: _Reader(HOLDFAST, sys.executable, folder), **readers}
    digests = {side: reader.digest(options) for side, reader in readers.items()}
    if len(set(digests.values())) > 1:
        raise BenchmarkFailed(f"the sides read other ids: {digests}")
    for reader in readers.values():
        reader.choose_setting(options)
    found: dict[str, list[LoopFigures]] = {side: [] for side in readers}
    for number in range(options.rounds):
        for side, reader in readers.items():
            figures = reader.read(options, options.steps)
            found[side].append(figures)
            report(f"read, round {number + 1}: {side}, {reader.setting!r}: {_described(figures)}")
    sides = {side: _summary(readers[side].setting, rounds) for side, rounds in found.items()}
    peers = [figures.tokens_per_processor_s for side, figures in sides.items() if side != HOLDFAST]
    ours = sides[HOLDFAST].tokens_per_processor_s
    whole, _ = digests[HOLDFAST]
    return Reading(round(ours / max(peers), 3) if peers else None, sides, whole)


class _Reader:
    """The processes of one side, which have its best setting once it is chosen."""

    def __init__(self, side: str, python: str, folder: Path) -> None:
        self._side, self._python, self._folder = side, python, folder
        self.setting = SETTINGS[side][0]

    def write(self) -> None:
        self._run("write")

    def digest(self, options: ReadOptions) -> tuple[int, int]:
        count, digest = json.loads(self._run("digest", self.setting, str(options.batch)))
        return count, digest

    def choose_setting(self, options: ReadOptions) -> None:
        """The one with most tokens per second of processor time, whatever it stalls."""
        if len(SETTINGS[self._side]) == 1:
            return
        steps, found = options.steps // _TRIAL_PART, {}
        for setting in SETTINGS[self._side]:
            self.setting = setting
            found[setting] = figures = self.read(options, steps)
            report(f"a trial: {self._side}, {setting!r}: {_described(figures)}")
        self.setting = max(found, key=lambda each: found[each].tokens_per_s)

    def read(self, options: ReadOptions, steps: int) -> LoopFigures:
        loop = (options.batch, options.warm_up, steps, options.step_s)
        return LoopFigures(**json.loads(self._run("read", self.setting, *map(str, loop))))

    def _run(self, what: str, *arguments: str) -> str:
        """The last line of its output."""
        ended = subprocess.run(
            [
                *(self._python, "-m", "benchmarks.data_parts.reader", what, self._side),
                *(str(self._folder), *arguments),
            ],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROCESS_S,
            check=False,
        )
        if ended.returncode:
            raise BenchmarkFailed(f"{self._side} could not {what}: {ended.stderr[-3000:]}")
        return (ended.stdout.splitlines() or [""])[-1]


def write(prepared: Prepared, data: DataSpec, options: ReadOptions, folder: Path) -> None:
    """Write what the sides read: the peers' windows, and the spec and the cache of our side."""
    made, length = prepared.token_set, options.sequence_length
    storage = open_storage(str(prepared.folder))
    contents = [
        read_shard(storage.read(shard.object_name), shard.object_name).tokens
        for shard in made.shards
    ]
    whole = [
        np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        for tokens in contents
        if len(tokens) > length
    ]
    np.save(folder / windows.FILE, np.concatenate(whole))
    of_set = PreparedSpec(
        uri=str(prepared.folder),
        origin=data.origin_of(data.sources[0]),
        digest=made.digest,
        vocabulary=made.tokenizer.vocabulary,
        tokens=made.tokens,
    )
    put_into_cache(folder, made, of_set)
    spec = TrainingSpec.model_validate(
        {
            "data": data.model_copy(update={"prepared": (of_set,)}),
            "model": {"sequence_length": length},
            "train": {"global_batch": options.batch, "micro_batch": options.batch},
        }
    )
    (folder / SPEC).write_text(spec.model_dump_json())


def _summary(setting: str, rounds: list[LoopFigures]) -> SideReading:
    stalls = [figures.stall_share for figures in rounds]
    return SideReading(
        setting=setting,
        stall_share=round(median(stalls), 5),
        greatest_stall_share=round(max(stalls), 5),
        tokens_per_processor_s=round(median(figures.tokens_per_s for figures in rounds)),
        batch_ms=round(median(1e3 * figures.loading_s / figures.steps for figures in rounds), 3),
    )


def _described(figures: LoopFigures) -> str:
    return (
        f"stall {figures.stall_share:.2%}, {figures.tokens_per_s / 1e6:.1f} million tokens per "
        f"processor second, {figures.total_s / figures.steps * 1e3:.1f} ms a step"
    )
