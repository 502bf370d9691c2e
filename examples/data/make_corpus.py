"""Makes a small corpus of two sources, and a tokenizer for it, from the standard library of Python.

    python examples/data/make_corpus.py /tmp/holdfast-data

`docs/*.parquet` has the documentation in the modules (column `content`), `code/*.jsonl.zst` their
code (key `text`), and `tokenizer.json` is a byte-pair encoding of 4,096 tokens, trained on both.
With a number after the folder, only so many modules are read.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END = "<|endoftext|>"
ROWS_OF_A_FILE = 2000


def main(folder: Path, most: int | None = None) -> None:
    texts = list(islice(_modules(Path(sysconfig.get_paths()["stdlib"])), most))
    docs = [doc for text in texts for doc in _docstrings(text)]
    (folder / "docs").mkdir(parents=True, exist_ok=True)
    (folder / "code").mkdir(exist_ok=True)
    for number, rows in enumerate(_batches(docs)):
        table = pyarrow.table({"content": rows})
        pyarrow.parquet.write_table(table, folder / "docs" / f"part-{number:03d}.parquet")
    for number, rows in enumerate(_batches(texts)):
        lines = "".join(f"{json.dumps({'text': row})}\n" for row in rows)
        path = folder / "code" / f"part-{number:03d}.jsonl.zst"
        with pyarrow.CompressedOutputStream(path, "zstd") as out:
            out.write(lines.encode())
    _train_tokenizer([*docs, *texts]).save(str(folder / "tokenizer.json"))
    print(f"{len(docs):,} texts of documentation and {len(texts):,} modules in {folder}")


def _modules(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            text = path.read_text(errors="replace")
            if text.strip():
                yield text


def _docstrings(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            yield doc


def _batches(rows: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(rows), ROWS_OF_A_FILE):
        yield rows[first : first + ROWS_OF_A_FILE]


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
