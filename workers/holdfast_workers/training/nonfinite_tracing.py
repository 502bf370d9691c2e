"""Finds the module whose output or gradient is first non-finite, by hooks that check all modules.

The hooks are far too slow for every step. They are installed once a guard has tripped, for one
more computation of that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast_workers.state.rank_state import local_of
from holdfast_workers.training.guards import NonfiniteOrigin


class NonfiniteTracer:
    """Records the first output of a module, or gradient of a parameter, that is not finite.

    A context manager: on exit the model is as before. Inside, compiled modules run uncompiled.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.origin: NonfiniteOrigin | None = None
        self._model = model
        self._rank = rank
        self._micro_batch = 0
        self._checked = 0
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._compiled: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> NonfiniteTracer:
        for name, module in self._model.named_modules():
            if module._compiled_call_impl is not None:
                self._compiled.append((module, module._compiled_call_impl))
                module._compiled_call_impl = None
            self._handles.append(
                module.register_forward_hook(
                    lambda module, _, output, name=name or "model": self._forward(
                        module, output, name
                    )
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled

    def start_micro_batch(self, micro_batch: int, checked: int = 0) -> None:
        """The following checks belong to this micro-batch. `checked`: more than other ranks have
        checked of it before."""
        self._micro_batch, self._checked = micro_batch, checked

    def check(self, tensors: Iterable[Tensor], layer: str, what: str) -> None:
        self._checked += 1
        if self.origin is None and not all_finite(tensors):
            self.origin = NonfiniteOrigin(self._rank, self._micro_batch, self._checked, layer, what)

    def _forward(self, module: nn.Module, output: Any, name: str) -> None:
        for parameter_name, parameter in module.named_parameters(recurse=False):
            # An unsharded parameter is another tensor than the model's own, so it is hooked here.
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                layer = f"{name}.{parameter_name}"
                handle: Any = parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, layer=layer: self.check([gradient], layer, "gradient")
                )
                self._handles.append(handle)
        if isinstance(output, Tensor):
            self.check([output], name, "output")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element of this rank's part of the tensors is finite."""
    return all(bool(torch.isfinite(local_of(tensor)).all()) for tensor in tensors)
