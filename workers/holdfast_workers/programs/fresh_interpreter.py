"""Makes a fork of a launcher look like an interpreter that has just started.

A script runs in it as under `python -u`. What the modules that are imported already have set, such
as filters of warnings, stays: it would be so after their import too. The differences that remain
are listed in `tests/workers/programs/test_fresh_interpreter.py`.
"""

from __future__ import annotations

import gc
import io
import random
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO


def restore(arguments: Sequence[str]) -> None:
    """Call it once in the fork, before the script with these arguments."""
    gc.enable()
    _open_streams()
    _seed_generators()
    sys.orig_argv = [sys.executable, "-u", *arguments]
    main: Any = threading.main_thread()
    main._set_native_id()  # it still has that of the launcher
    tempfile.tempdir = None  # the script may set TMPDIR


def _open_streams() -> None:
    """Streams without buffers: what a script has printed is out, however it ends. Text that is
    not UTF-8 is escaped instead of ending it: the log is UTF-8, whatever the locale is."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        raw: Any = io.FileIO(("stdin", "stdout", "stderr").index(name), mode, closefd=False)
        raw.name = f"<{name}>"
        buffer: BinaryIO = io.BufferedReader(raw) if mode == "r" else raw
        stream: Any = io.TextIOWrapper(buffer, "utf-8", "backslashreplace", write_through=True)
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _seed_generators() -> None:
    """Every interpreter starts with other random numbers; forks of one process would share them.
    The generators of devices start with a constant seed, which a fork has too."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
