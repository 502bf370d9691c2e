"""Texts to token ids on disk: a token set, as the tasks of a cluster make it, against
`datasets.map`, in as many processes. Both make the same ids in the same order."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import tokenizers
from numpy.typing import NDArray

from benchmarks.conditions import BenchmarkFailed, report
from benchmarks.data_parts.corpus import COLUMN, END, TextCorpus
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.data.token_set import Tokens, TokenSet, read_shard
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import DataSpec, SourceSpec
from holdfast_workers.token_sets.part_results import PartResult
from holdfast_workers.token_sets.plan import Part, PreparePlan, plan_parts
from holdfast_workers.token_sets.prepare import finish, make_part
from holdfast_workers.token_sets.source_files import list_source
from holdfast_workers.token_sets.tokenizer_file import TokenizerFile, read_tokenizer

_IDS = "ids"


@dataclass(frozen=True)
class PrepareFigures:
    """Medians over the rounds. The ratios, of each round, divide the peer's time by ours: above 1,
    ours is less. `ratio` is that of processor time, which other load on the machine changes less.
    """

    ratio: float
    clock_ratio: float
    holdfast_s: float
    map_s: float
    holdfast_processor_s: float
    map_processor_s: float
    round_ratios: list[float]
    tokens: int


@dataclass(frozen=True)
class Prepared:
    figures: PrepareFigures
    token_set: TokenSet
    folder: Path
    """Of the token set."""


def measure(corpus: TextCorpus, processes: int, rounds: int, folder: Path) -> Prepared:
    """Raises BenchmarkFailed if the two sides make different ids."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    datasets.disable_progress_bars()
    folder.mkdir()
    files = sorted(map(str, corpus.folder.iterdir()))
    rows = datasets.Dataset.from_parquet(files, cache_dir=str(folder / "rows"))
    ours, theirs = folder / "token-set", folder / "mapped"
    took: list[tuple[_Took, _Took]] = []
    for number in range(rounds):
        for each in (ours, theirs):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir()
        made, of_ours = _timed(partial(_token_set, corpus, processes, ours))
        mapped, of_theirs = _timed(partial(_map, corpus, processes, rows, theirs))
        took.append((of_ours, of_theirs))
        report(f"prepared, round {number + 1}: holdfast {of_ours}, datasets.map {of_theirs}")
        if not np.array_equal(_ids_of(made, ours), _ids_of_column(mapped)):
            raise BenchmarkFailed("datasets.map has made other ids")
        del mapped
    return Prepared(_figures(took, made.tokens), made, ours)


@dataclass(frozen=True)
class _Took:
    clock_s: float
    processor_s: float

    def __str__(self) -> str:
        return f"{self.clock_s:.2f} s, of processors {self.processor_s:.2f} s"


def _figures(took: list[tuple[_Took, _Took]], tokens: int) -> PrepareFigures:
    def of(side: int, value: Callable[[_Took], float]) -> float:
        return round(median(value(both[side]) for both in took), 3)

    ratios = [round(theirs.processor_s / ours.processor_s, 3) for ours, theirs in took]
    ours_s, theirs_s = (of(side, lambda each: each.clock_s) for side in (0, 1))
    ours_cpu, theirs_cpu = (of(side, lambda each: each.processor_s) for side in (0, 1))
    return PrepareFigures(
        ratio=median(ratios),
        clock_ratio=round(median(theirs.clock_s / ours.clock_s for ours, theirs in took), 3),
        holdfast_s=ours_s,
        map_s=theirs_s,
        holdfast_processor_s=ours_cpu,
        map_processor_s=theirs_cpu,
        round_ratios=ratios,
        tokens=tokens,
    )


def _timed(make: Callable[[], Any]) -> tuple[Any, _Took]:
    """What it makes; with the processor time of its processes, which must have ended."""
    began, used = time.perf_counter(), _used_s()
    made = make()
    return made, _Took(time.perf_counter() - began, _used_s() - used)


def _used_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


# --- Holdfast ---------------------------------------------------------------------------------


def data_spec(corpus: TextCorpus) -> DataSpec:
    source = SourceSpec(path=f"{corpus.folder}/*.parquet", text=COLUMN)
    return DataSpec(tokenizer=str(corpus.tokenizer), document_end=END, sources=(source,))


def _token_set(corpus: TextCorpus, processes: int, folder: Path) -> TokenSet:
    """A part is about a file, so that each process has some, as with sources of gigabytes."""
    data = data_spec(corpus)
    tokenizer = read_tokenizer(data)
    files = list_source(data.sources[0], StorageOptions())
    part_bytes = max(file.nbytes for file in files)
    plan = plan_parts(data.sources[0], files, tokenizer.facts, data, part_bytes)
    make = partial(_make_part, plan, tokenizer, folder)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        results = {each.index: each for each in pool.imap_unordered(make, plan.parts)}
        pool.close()
        pool.join()
    return finish(plan, results, open_storage(str(folder)))


def _make_part(plan: PreparePlan, tokenizer: TokenizerFile, folder: Path, part: Part) -> PartResult:
    storage = open_storage(str(folder))
    options, scratch = StorageOptions(), folder / "scratch"
    return make_part(plan, part, tokenizer, storage, options, scratch, lambda _: None)


def _ids_of(made: TokenSet, folder: Path) -> Tokens:
    storage = open_storage(str(folder))
    shards = ((shard, storage.read(shard.object_name)) for shard in made.shards)
    return np.concatenate([read_shard(content, s.object_name).tokens for s, content in shards])


# --- datasets.map -----------------------------------------------------------------------------


def _map(corpus: TextCorpus, processes: int, rows: Any, folder: Path) -> Any:
    """The ids as uint16, whose arrays it writes faster than those of int64."""
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus.tokenizer))
    end = tokenizer.token_to_id(END)
    assert end is not None  # the corpus trains it so

    def encoded(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer.encode_batch_fast(batch[COLUMN], add_special_tokens=False)
        return {_IDS: [[*each.ids, end] for each in found]}

    kind = datasets.Features({_IDS: datasets.Sequence(datasets.Value("uint16"))})
    return rows.map(
        encoded,
        batched=True,
        num_proc=processes,
        remove_columns=rows.column_names,
        features=kind,
        load_from_cache_file=False,
        cache_file_name=str(folder / "ids.arrow"),
    )


def _ids_of_column(mapped: Any) -> NDArray[np.integer]:
    values: NDArray[np.integer] = mapped.data.column(_IDS).combine_chunks().values.to_numpy()
    return values
