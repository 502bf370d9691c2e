"""Runs a user's script in this process as Python itself would: as `__main__`, from its first line.

For a process that was forked from one that has imported modules. It ends as an interpreter does:
threads are joined, exit handlers run, and the exit code is the script's.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn


def run(arguments: Sequence[str], on_end: Callable[[Exception | int], None]) -> NoReturn:
    """Run `[script, ...]` or `["-m", module, ...]` and end this process. `on_end` is called with an
    exception that leaves the script, then with the script's exit code, before its threads are
    waited for; it must not raise."""
    code = 1
    try:
        code = _exit_code(lambda: execute(arguments), on_end)
        on_end(code)
        code = _exit_code(lambda: _end_threads(code), on_end) or code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def execute(arguments: Sequence[str]) -> None:
    """Run it as `__main__`, which it stays. Raises what leaves it, also SystemExit."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None, __annotations__={})
    code = _of_module(arguments, main) if arguments[0] == "-m" else _of_file(arguments, main)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _of_file(arguments: Sequence[str], main: ModuleType) -> CodeType:
    path = os.path.abspath(arguments[0])  # noqa: PTH100  (links stay, as in the interpreter)
    sys.argv = list(arguments)
    folder = str(Path(path).resolve().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __package__=None, __loader__=loader)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _of_module(arguments: Sequence[str], main: ModuleType) -> CodeType:
    name = arguments[1]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(name) if loader is not None else None
    if spec is None or code is None:
        raise ImportError(f"there is no module {name} to run")
    sys.argv = [str(spec.origin), *arguments[2:]]
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __package__=spec.parent,
        __loader__=loader,
        __spec__=spec,
    )
    return code  # type: ignore[no-any-return]


def _exit_code(part: Callable[[], None], on_end: Callable[[Exception], None]) -> int:
    """The exit code that an interpreter would have after this part."""
    try:
        part()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except Exception as error:
        error.__traceback__ = _from_users_code(error)
        on_end(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _from_users_code(error: Exception) -> Any:
    """The traceback without the frames of this module."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    return frame


def _end_threads(code: int) -> None:
    """Wait for the threads, as the interpreter does. One that never ends is left by SIGTERM: then
    this process ends with the code of the script."""

    def leave(*_: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
