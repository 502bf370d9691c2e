"""Fetches of token sets into the cache of a node, without its agent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.storage import ObjectReader
from holdfast_workers.spec import DataSpec, ModelSpec, PreparedSpec, TrainingSpec, TrainSpec
from holdfast_workers.token_sets.node_fetch import FetchProgress, Pauses, fetch

AT_ONCE = Pauses(retries_s=(0.0,), round_s=0.02, room_s=0.02, look_s=0.02)
LENGTH, SEED = 16, 2


def spec_of(data: DataSpec, global_batch: int = 1) -> TrainingSpec:
    train = TrainSpec(seed=SEED, global_batch=global_batch)
    return TrainingSpec(data=data, model=ModelSpec(sequence_length=LENGTH), train=train)


def local(uri: str) -> LocalStorage:
    return LocalStorage(Path(uri))


class RecordingStore(LocalStorage):
    """Records the objects that are opened; `at_open` may raise or wait."""

    def __init__(self, root: Path, at_open: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(root)
        self.opened: list[str] = []
        self._at_open = at_open

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        self.opened.append(name)
        self._at_open(name)
        with super().open(name) as source:
            yield source


def fetched(
    cache: Path,
    *prepared: PreparedSpec,
    open_set: Callable[[str], LocalStorage] = local,
    stop: threading.Event | None = None,
    data: DataSpec | None = None,
    window: int = 0,
) -> list[FetchProgress]:
    """Fetch until all is there."""
    return bring(spec_of(data or DataSpec(prepared=prepared)), cache, open_set, stop, window)


def bring(
    spec: TrainingSpec,
    cache: Path,
    open_set: Callable[[str], LocalStorage] = local,
    stop: threading.Event | None = None,
    window: int = 0,
) -> list[FetchProgress]:
    """Fetch what this run reads, until all is there."""
    progress: list[FetchProgress] = []
    stop = stop or threading.Event()

    def keep(now: FetchProgress) -> None:
        progress.append(now)
        if now.is_whole:
            stop.set()

    fetch(spec, open_set, cache, stop, keep, lambda: window, AT_ONCE)
    return progress
