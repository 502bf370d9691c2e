"""Token ids for training: prepared, looked up and read beside steps, against peers in one run.

    python -m benchmarks.data --json [--peers arrow mosaic] [--rounds N]

- `prepare_ratio`: the processor time of `datasets.map` by that of a token set, of the same texts,
  with the same tokenizer and number of processes.
- `stall_share`: of steps that compute for `--step-s` on one thread, the share in which they wait
  for their batch, as a rank of the recipe `pretrain` takes it.
- `tokens_ratio`: tokens that are read for a second of processor time, beside the steps, by those of
  the better peer: torch's `DataLoader` over an Arrow data set of `datasets`, and
  `mosaicml-streaming`, each with that of a few settings which takes the least.
- `lookup_ms`: the samples of a batch at position 10^8 of three sources of `--shards` each.

The text is that of Python modules here, its tokenizer is trained on it, and all sides read the same
windows of its ids. Without `--mosaic-python` the benchmark creates an environment for that peer.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.conditions import ROOT, report, run
from benchmarks.data_parts import corpus, lookup, preparing, reading
from benchmarks.data_parts.lookup import LookupFigures
from benchmarks.data_parts.preparing import PrepareFigures
from benchmarks.data_parts.reading import ReadOptions, SideReading
from benchmarks.environments import python_with

Peer = Literal["arrow", "mosaic"]
MOSAIC = ("mosaicml-streaming==0.13.0", "torchvision==0.28.0")
"""Another version of torchvision would bring another torch, with CUDA."""
_FILES_OF_A_PROCESS = 4
_SEED = 1


@dataclass(frozen=True)
class DataResult:
    """The last line. `tokens_ratio` is None without peers."""

    stall_share: float
    tokens_ratio: float | None
    prepare_ratio: float
    lookup_ms: float
    reading: dict[str, SideReading]
    preparing: PrepareFigures
    lookup: LookupFigures


def measure(
    text_mb: float = 32.0,
    vocabulary: int = 16_384,
    processes: int = 2,
    prepare_rounds: int = 5,
    sequence_length: int = 1024,
    batch: int = 16,
    warm_up: int = 30,
    steps: int = 300,
    step_s: float = 0.05,
    rounds: int = 5,
    shards: int = 200_000,
    lookups: int = 1000,
    peers: tuple[Peer, ...] = ("arrow", "mosaic"),
    mosaic_python: str | None = None,
    mosaic_home: Path = ROOT / "build" / "mosaicml-streaming",
    folder: Path | None = None,
) -> DataResult:
    """Measure all sides.

    Args:
        text_mb: of the corpus, in units of 10^6 bytes
        processes: that prepare
        batch: samples of a step
        step_s: processor time of a step, without its data
        rounds: of reading, with each side in turn
        shards: of each of three sources, for look-ups
        mosaic_python: an interpreter with mosaicml-streaming 0.13
        mosaic_home: folder of the environment that is created without
        folder: on a local disk; default: the temporary one
    """
    pythons = dict.fromkeys(map(str, peers), sys.executable)
    if "mosaic" in pythons:
        pythons["mosaic"] = mosaic_python or python_with(mosaic_home, "streaming", *MOSAIC)
    with tempfile.TemporaryDirectory(
        prefix="bench-", dir=folder, ignore_cleanup_errors=True
    ) as scratch:
        at = Path(scratch)
        files = _FILES_OF_A_PROCESS * processes
        text = corpus.make_corpus(at, int(text_mb * 1e6), files, vocabulary, _SEED)
        report(f"{text.documents:,} documents of {text.nbytes / 1e6:.1f} MB in {files} files")
        prepared = preparing.measure(text, processes, prepare_rounds, at / "prepared")
        report(f"{prepared.figures.tokens:,} tokens of a vocabulary of {vocabulary:,}")
        options = ReadOptions(sequence_length, batch, warm_up, steps, step_s, rounds)
        data = preparing.data_spec(text)
        read = reading.measure(prepared, data, pythons, options, at / "read")
        report(f"all sides read {read.windows:,} windows of {sequence_length} targets")
    found = lookup.measure(shards, batch, sequence_length, lookups, _SEED)
    return DataResult(
        stall_share=read.sides[reading.HOLDFAST].stall_share,
        tokens_ratio=read.ratio,
        prepare_ratio=prepared.figures.ratio,
        lookup_ms=found.median_ms,
        reading=read.sides,
        preparing=prepared.figures,
        lookup=found,
    )


if __name__ == "__main__":
    run(measure)
