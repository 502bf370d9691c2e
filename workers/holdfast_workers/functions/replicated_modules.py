"""Modules of a function that the user wrapped in torch's DistributedDataParallel (DDP).

The state has the names of the bare module, so it can be loaded with and without the wrapper. The
wrapper reduces gradients in a step's last micro-batch only. By default it adds up whole buckets,
which torch orders anew after the first step; with three or more ranks the bits of a sum depend on
its place in the bucket, so the first step after a fault would have other bits. Here it adds up
each gradient on its own, in collectives that are counted. A communication hook of the user stays.
"""

# Without `from __future__ import annotations`: torch checks the annotations of a hook as objects.
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def wrappers_in(module: nn.Module) -> list[DistributedDataParallel]:
    """`module` itself, if it is wrapped, and the wrapped modules in it."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]


def bare_names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Each part of the names in `module` that is a wrapper's, innermost first, and the part that
    stands for it without the wrapper."""
    for path, part in reversed([*module.named_modules()]):
        if isinstance(part, DistributedDataParallel):
            prefix = f"{path}." if path else ""
            yield f"{prefix}module.", prefix


def bare_name(name: str, replaced: list[tuple[str, str]]) -> str:
    """`name` without wrappers; `replaced` comes from :func:`bare_names`."""
    for wrapped, bare in replaced:
        if name.startswith(wrapped):
            name = bare + name.removeprefix(wrapped)
    return name


class ReducingWrapper:
    """A DDP wrapper, and which gradients it has averaged in the present step.

    Nothing else tells: a wrapper knows no parameter that was frozen when it was made, and a pass
    under `no_sync()` averages none.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self._noted: set[int] | None = None

    def reduce_each_gradient(self) -> None:
        """Replace the sums of whole buckets, unless the wrapper has a communication hook."""
        if getattr(self.module, "_comm_hooks", None) == []:
            self._noted = set()
            state = _HookState(self.module.process_group, self._noted)
            self.module.register_comm_hook(state, _mean_of_each)

    def prepare(self, last: bool) -> None:
        """Call before each micro-batch. A static graph is reduced in each of them: torch records it
        in the first one."""
        self.forget()
        if not self.module.static_graph:
            self.module.require_backward_grad_sync = last

    def forget(self) -> None:
        """The gradients that were averaged are used up, or will be added to."""
        if self._noted is not None:
            self._noted.clear()

    def has_averaged(self, parameter: Tensor) -> bool:
        if self._noted is None:
            return bool(self.module.require_backward_grad_sync)
        return id(parameter) in self._noted

    def parameters(self) -> Iterator[Tensor]:
        """The parameters whose gradients the wrapper may average."""
        for name, parameter in self.module.module.named_parameters():
            if name not in self.module.parameters_to_ignore:
                yield parameter


class _HookState(NamedTuple):
    group: dist.ProcessGroup
    noted: set[int]


def _mean_of_each(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    group = state.group
    state.noted.update(map(id, bucket.parameters()))
    whole = bucket.buffer()
    whole.div_(group.size())
    sizes = [gradient.numel() for gradient in bucket.gradients()]
    pieces = [whole] if whole.is_sparse else torch.split(whole, sizes)
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    futures = [work.get_future() for work in works if work is not None]
    together = torch.futures.collect_all(futures)

    def finished(done: torch.futures.Future[list[torch.futures.Future[object]]]) -> Tensor:
        for future in done.value():
            future.value()  # raises the error of a sum
        return whole

    return together.then(finished)
