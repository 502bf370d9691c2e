"""Finds what a function uses beside its registered parts, and has not registered.

A learning-rate scheduler that is not registered begins anew after a fault; a DDP wrapper that is
not registered averages gradients in buckets, in another order after a fault. Nothing registered
refers to either, so they are looked for among all objects of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Set
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
    names = {id(part): name for name, part in (*parameters.items(), *optimizers.items())}
    registered = set(map(id, (*objects.values(), *wrappers)))
    find = partial(_unregistered_users, names, registered)
    if find():
        gc.collect()  # what nothing refers to any more may still wait for it
    for user, name in find():
        if isinstance(user, DistributedDataParallel):
            raise FunctionError(
                f"{name} is wrapped in DistributedDataParallel, and the wrapper is not registered: "
                "register the wrapper in place of the module in it"
            )
        if not _is_saved(user, objects):
            raise FunctionError(
                f"{name} has a learning-rate scheduler ({type(user).__qualname__}) that is not "
                "registered: after a fault it would begin anew. Register it too, as in "
                "ctx.register(schedule=schedule)"
            )


def _unregistered_users(names: Mapping[int, str], registered: Set[int]) -> list[tuple[Any, str]]:
    """The schedulers and wrappers, each with what it uses of the parts of these `names`."""
    kinds = {*_with_subclasses(LRScheduler), *_with_subclasses(DistributedDataParallel)}
    kind_ids = set(map(id, kinds))
    found = []
    # Not `isinstance`: it is slow, and asks proxies for their class, which may import something.
    # Ids, because not every type can be hashed.
    for each in (each for each in gc.get_objects() if id(type(each)) in kind_ids):
        is_scheduler = isinstance(each, LRScheduler)
        used = [getattr(each, "optimizer", None)] if is_scheduler else each.parameters()
        name = next((names[id(part)] for part in used if id(part) in names), None)
        if name is not None and id(each) not in registered:
            found.append((each, name))
    return found


def _is_saved(scheduler: Any, objects: Mapping[str, Any]) -> bool:
    """Whether what an object saves changes with the scheduler, because the object contains it."""
    if not hasattr(scheduler, "last_epoch"):  # a chain: its links are schedulers too
        return True
    for name in sorted(objects, key=lambda name: not isinstance(objects[name], LRScheduler)):
        before = encode(objects[name].state_dict(), name)
        scheduler.last_epoch += 1
        try:
            if encode(objects[name].state_dict(), name) != before:
                return True
        finally:
            scheduler.last_epoch -= 1
    return False


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
