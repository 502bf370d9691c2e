"""Small corpora for the tests of the training core."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


@contextmanager
def small_corpus(folder: Path) -> Iterator[None]:
    """Three files of numbers in `folder`, which `tiny_spec` then reads."""
    words = random.Random(5)
    for index in range(3):
        text = " ".join(str(words.randrange(100)) for _ in range(4000))
        (folder / f"part{index}.txt").write_text(text)
    with patch.dict(os.environ, HOLDFAST_TEST_CORPUS=str(folder)):
        yield
