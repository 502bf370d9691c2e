"""Text for the benchmark, and a tokenizer for it: the Python modules of this installation.

A document is a module. They are taken in random order by the seed, so that the files have all kinds
of them.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
COLUMN = "text"
TRAINED_ON_BYTES = 8_000_000
MOST_BYTES = 200_000
"""Of a document: larger modules are tables that programs have written, not texts."""
_ROWS_OF_A_GROUP = 256


@dataclass(frozen=True)
class TextCorpus:
    folder: Path
    """Of Parquet files, with the text in the column `COLUMN`."""
    tokenizer: Path
    nbytes: int
    """Of the text in UTF-8."""
    documents: int


def make_corpus(
    folder: Path, text_bytes: int, files: int, vocabulary: int, seed: int
) -> TextCorpus:
    """`files`: of about the same length. Raises ValueError if this installation has less text."""
    texts = list(_texts(text_bytes, seed))
    sizes = [len(text.encode()) for text in texts]
    if sum(sizes) < text_bytes:
        raise ValueError(f"this installation has {sum(sizes) / 1e6:.0f} MB of Python modules")
    tables = folder / "text"
    tables.mkdir(parents=True)
    for number, rows in enumerate(_divided(texts, files)):
        pyarrow.parquet.write_table(
            pyarrow.table({COLUMN: rows}),
            tables / f"part-{number:03d}.parquet",
            row_group_size=_ROWS_OF_A_GROUP,
        )
    tokenizer = folder / "tokenizer.json"
    _train_tokenizer(_first(texts, TRAINED_ON_BYTES), vocabulary).save(str(tokenizer))
    return TextCorpus(tables, tokenizer, sum(sizes), len(texts))


def _texts(text_bytes: int, seed: int) -> Iterator[str]:
    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    paths = sorted({path for root in roots for path in Path(root).rglob("*.py")})
    random.Random(seed).shuffle(paths)
    taken = 0
    for path in paths:
        if taken >= text_bytes:
            return
        text = path.read_text(errors="replace")
        nbytes = len(text.encode())
        if text.strip() and nbytes <= MOST_BYTES and END not in text:
            taken += nbytes
            yield text


def _divided(texts: list[str], files: int) -> list[list[str]]:
    """About the same length for each file: no process gets more to do than another."""
    parts: list[list[str]] = [[] for _ in range(files)]
    sizes = [0] * files
    for text in texts:
        least = sizes.index(min(sizes))
        parts[least].append(text)
        sizes[least] += len(text)
    return parts


def _first(texts: list[str], nbytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        nbytes -= len(text)
        if nbytes <= 0:
            return


def _train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
