"""Finds what a function uses beside its registered parts, and has not registered.

A learning-rate scheduler that is not registered begins anew after a fault; a DDP wrapper that is
not registered averages gradients in buckets, in another order after a fault. Nothing registered
refers to either, so they are looked for among all objects of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast_workers.functions.encoding import encode
from holdfast_workers.functions.function_errors import FunctionError


def refuse_forgotten_parts(
    parameters: Mapping[str, Tensor],
    optimizers: Mapping[str, Optimizer],
    objects: Mapping[str, Any],
    wrappers: Collection[DistributedDataParallel],
) -> None:
    """Raise FunctionError if a learning-rate scheduler of a registered optimizer is no part of what
    any of the registered `objects` saves, or if a DDP wrapper that is none of the registered
    `wrappers` has any of the trained `parameters`."""
    find = partial(_forgotten, parameters, optimizers, objects, wrappers)
    if find():
        gc.collect()  # what nothing refers to any more may still wait for it
        if problem := find():
            raise FunctionError(problem)


def _forgotten(
    parameters: Mapping[str, Tensor],
    optimizers: Mapping[str, Optimizer],
    objects: Mapping[str, Any],
    wrappers: Collection[DistributedDataParallel],
) -> str:
    """What is wrong with the first forgotten part; empty: there is none."""
    names = {id(part): name for name, part in (*parameters.items(), *optimizers.items())}
    known = set(map(id, wrappers))
    kinds = {*_with_subclasses(LRScheduler), *_with_subclasses(DistributedDataParallel)}
    # Not `isinstance`: it is slow, and asks proxies for their class, which may import something.
    for part in (each for each in gc.get_objects() if type(each) in kinds):
        if isinstance(part, LRScheduler):
            optimizer = names.get(id(getattr(part, "optimizer", None)))
            if optimizer is not None and not _is_saved(part, objects):
                kind = type(part).__qualname__
                return (
                    f"{optimizer} has a learning-rate scheduler ({kind}) that is not registered: "
                    "after a fault it would begin anew. Register it too, as in "
                    "ctx.register(schedule=schedule)"
                )
        elif id(part) not in known:
            wrapped = next((names[id(p)] for p in part.parameters() if id(p) in names), None)
            if wrapped is not None:
                return (
                    f"{wrapped} is wrapped in DistributedDataParallel, and the wrapper is not "
                    "registered: register the wrapper in place of the module in it"
                )
    return ""


def _is_saved(scheduler: Any, objects: Mapping[str, Any]) -> bool:
    """Whether what an object saves changes with the scheduler: itself, or what contains it."""
    if any(part is scheduler for part in objects.values()):
        return True

    def saved() -> list[bytes]:
        return [encode(part.state_dict(), name) for name, part in objects.items()]

    before = saved()
    scheduler.last_epoch += 1
    try:
        return saved() != before
    finally:
        scheduler.last_epoch -= 1


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
