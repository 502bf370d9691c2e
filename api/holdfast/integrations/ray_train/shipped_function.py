"""Finds the folder with which a training function is shipped to the ranks, which import it."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.integrations.ray_train.errors import FunctionUnusable
from holdfast.integrations.ray_train.job_document import ShippedFunction


def shipped(function: Callable[..., Any]) -> ShippedFunction:
    """The reference and the folder of a function. One of the program itself is shipped by the
    program's file. Raises FunctionUnusable."""
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in name:
        raise FunctionUnusable(
            f"{name or function!r} cannot be imported by a rank: define the training function at "
            "the top of a module, and pass what it needs in train_loop_config"
        )
    module = sys.modules.get(function.__module__)
    file = Path(getattr(module, "__file__", None) or "")
    if module is None or not file.is_file():
        raise FunctionUnusable(
            f"{name} is defined in {function.__module__}, which is not a file: put it into a "
            "module, such as train_loop.py, and import it from there"
        )
    module_name = _module_name(module, file)
    folder = _root(module_name, file)
    return ShippedFunction(f"{module_name}:{name}", None if _is_installed(folder) else folder)


def _module_name(module: ModuleType, file: Path) -> str:
    """The name under which the module can be imported; that of the program itself is not
    `__main__`."""
    if module.__name__ != "__main__":
        return module.__name__
    spec = getattr(module, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    if not file.stem.isidentifier():
        raise FunctionUnusable(
            f"{file.name} cannot be imported by a rank, because {file.stem!r} is no module name: "
            "rename it, or put the training function into a module"
        )
    return file.stem


def _root(module_name: str, file: Path) -> Path:
    """The folder in which the import of the module starts."""
    is_package = file.name == "__init__.py"
    levels = module_name.count(".") + (1 if is_package else 0)
    return file.absolute().parents[levels]


def _is_installed(folder: Path) -> bool:
    places = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
    return any(folder.is_relative_to(place) for place in places)
