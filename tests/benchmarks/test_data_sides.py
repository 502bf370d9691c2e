"""What `benchmarks.data` compares: both sides make and read the same token ids, and the loop beside
the steps sees what loading costs. Its peer mosaicml-streaming is in the smoke run alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest
import torch
from benchmarks.data_parts import arrow_side, corpus, holdfast_side, lookup, preparing, reading
from benchmarks.data_parts.preparing import Prepared
from benchmarks.data_parts.read_loop import Batch, beside_steps, window_digest
from benchmarks.data_parts.reading import ReadOptions

OPTIONS = ReadOptions(sequence_length=64, batch=8, warm_up=1, steps=4, step_s=0.002, rounds=1)
PROCESSES = 2
BATCH: Batch = (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Path]:
    """A small corpus, prepared by both sides, and the folder that all sides read."""
    folder = tmp_path_factory.mktemp("data")
    text = corpus.make_corpus(folder, 200_000, 4, 500, seed=1)
    prepared = preparing.measure(text, PROCESSES, 1, folder / "prepared")
    (folder / "read").mkdir()
    reading.write(prepared, preparing.data_spec(text), OPTIONS, folder / "read")
    arrow_side.write(folder / "read")
    return prepared, folder / "read"


def test_both_sides_make_the_same_ids(made: tuple[Prepared, Path]) -> None:
    figures = made[0].figures
    assert figures.tokens > 50_000
    assert min(figures.ratio, figures.clock_ratio, *figures.round_ratios) > 0


@pytest.mark.parametrize("setting", reading.SETTINGS["arrow"])
def test_an_epoch_of_a_peer_has_the_same_windows(made: tuple[Prepared, Path], setting: str) -> None:
    ours = window_digest(next(holdfast_side.epochs(made[1], OPTIONS.batch, "")))
    theirs = window_digest(next(arrow_side.epochs(made[1], OPTIONS.batch, setting)))
    assert ours == theirs
    assert ours[0] > 500


def test_another_id_or_place_is_another_window() -> None:
    inputs, targets = BATCH
    first, second = inputs.clone(), inputs.clone()
    first[0, 0] = second[0, 1] = 1
    digests = [window_digest([(each, targets)]) for each in (inputs, first, second)]
    assert len(set(digests)) == 3
    assert window_digest([(first, targets), BATCH, BATCH]) == digests[1], "each window once"


def test_steps_wait_for_batches_that_are_late() -> None:
    def late() -> Iterator[Batch]:
        while True:
            time.sleep(10 * OPTIONS.step_s)
            yield BATCH

    figures = beside_steps(late(), 1, 4, OPTIONS.step_s)
    assert figures.stall_share > 0.5
    assert figures.steps == 4
    assert figures.tokens == 4 * 6
    assert beside_steps(repeat(BATCH), 1, 4, OPTIONS.step_s).stall_share < figures.stall_share


def test_the_processor_time_of_loading_is_apart_from_that_of_the_steps() -> None:
    used = 0.0

    def busy() -> Iterator[Batch]:
        nonlocal used
        while True:
            began = time.thread_time()
            while time.thread_time() < began + 10 * OPTIONS.step_s:
                pass
            used += time.thread_time() - began
            yield BATCH

    figures = beside_steps(busy(), 0, 4, OPTIONS.step_s)
    assert used <= figures.loading_s < figures.total_s


def test_samples_far_inside_a_mixture_are_looked_up() -> None:
    found = lookup.measure(50, 4, 64, 3, seed=1)
    assert 0 < found.median_ms <= found.greatest_ms
