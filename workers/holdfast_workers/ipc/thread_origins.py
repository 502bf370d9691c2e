"""Finds the modules that have started threads in this process while they were imported.

A process with threads must not be forked: in the child the threads are gone, and a lock that one of
them held stays held for ever. Threads that were there before, such as those of a preloaded
allocator, do not count: a library that a process starts with has to expect forks.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from typing import Any

from holdfast_workers.ipc import linux_processes

_IMPORT_STEPS = (
    (SourceFileLoader, "exec_module"),
    (SourcelessFileLoader, "exec_module"),
    (ExtensionFileLoader, "create_module"),
    (ExtensionFileLoader, "exec_module"),
)
"""The calls that run a module's code. A library that an extension loads runs in the first."""

_NAMES_SHOWN = 3
_BEFORE = ""


class ThreadOrigins:
    """The threads that were started since this object was made. Use it in the main thread."""

    def __init__(self) -> None:
        self._origins = dict.fromkeys(linux_processes.thread_ids(), _BEFORE)
        self._running: list[str] = []

    @contextmanager
    def recording(self, subject: str) -> Iterator[None]:
        """Note for each thread that is started in this context which module's import started it;
        `subject` stands for code outside of an import."""
        originals = [(loader, step, getattr(loader, step)) for loader, step in _IMPORT_STEPS]
        for loader, step, original in originals:
            setattr(loader, step, self._recorded(original))
        try:
            with self._running_code_of(subject):
                yield
        finally:
            for loader, step, original in originals:
                setattr(loader, step, original)

    def started(self) -> tuple[str, ...]:
        """Each module with threads that still run, with some of their names."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        found: dict[str, dict[str, None]] = {}
        for thread in sorted(linux_processes.thread_ids() - {os.getpid()}):
            origin = self._origins.get(thread, "code that ran after the imports")
            if origin != _BEFORE:
                name = names.get(thread) or linux_processes.thread_name(thread)
                found.setdefault(origin, {})[name] = None
        return tuple(f"{origin} ({_some(names)})" for origin, names in found.items())

    def _recorded(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(original)
        def recorded(loader: Any, module: Any) -> Any:
            with self._running_code_of(loader.name):
                return original(loader, module)

        return recorded

    @contextmanager
    def _running_code_of(self, module: str) -> Iterator[None]:
        if threading.get_native_id() != os.getpid():  # a thread of the module imports more
            yield
            return
        self._note_new()
        self._running.append(module)
        try:
            yield
        finally:
            self._note_new()
            self._running.pop()

    def _note_new(self) -> None:
        origin = self._running[-1] if self._running else _BEFORE
        for thread in linux_processes.thread_ids():
            self._origins.setdefault(thread, origin)


def _some(names: dict[str, None]) -> str:
    shown = [*names][:_NAMES_SHOWN]
    return ", ".join(shown if len(shown) == len(names) else [*shown, "…"])
