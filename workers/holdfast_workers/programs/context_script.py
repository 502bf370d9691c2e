"""A script that trains in the steps of a context: called like a function, once in each attempt.

The script finds its context as `holdfast.attach().context`. It runs as `__main__`, from its first
line, in the worker process itself: what it has imported is there when it runs again.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.programs import python_main
from holdfast_workers.programs.attachment import attach

if TYPE_CHECKING:
    from holdfast_workers.functions.context import Context
    from holdfast_workers.spec import TrainingSpec


class ContextScript:
    """The function that a script is."""

    def __init__(self, spec: TrainingSpec) -> None:
        """Imports what the spec preloads."""
        self._arguments = spec.script or ()
        for name in spec.preloaded:
            importlib.import_module(name)

    def __call__(self, context: Context) -> None:
        """Run the script to its end. Raises what leaves it, and FunctionError for an exit status
        other than 0."""
        before, arguments = sys.modules["__main__"], sys.argv
        try:
            with attach().offering(context):
                python_main.execute(self._arguments)
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise FunctionError(
                    f"{self._arguments[0]} ended with exit status {ended.code}"
                ) from ended
        finally:  # its objects must not outlive it: an accelerator has no room for them twice
            sys.modules["__main__"], sys.argv = before, arguments
