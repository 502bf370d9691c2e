"""Finding the module in which a computation ceases to be finite, by hooks that look at everything.

Far too slow for every step: they are put on once a guard has tripped, for one more computation of
the very step.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast_workers.state.rank_state import local_of
from holdfast_workers.training.guards import Place


class Tracer:
    """Notes the first output of a module, or gradient of a parameter, that is not finite.

    A context: outside of it the model is as before. Compiled modules run uncompiled inside.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.found: Place | None = None
        self._model = model
        self._rank = rank
        self._micro_batch = 0
        self._looked = 0
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._compiled: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> Tracer:
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

    def begin(self, micro_batch: int) -> None:
        """What is looked at from now on is of this micro-batch."""
        self._micro_batch, self._looked = micro_batch, 0

    def look(self, tensors: Iterable[Tensor], layer: str, what: str) -> None:
        self._looked += 1
        if self.found is None and not all_finite(tensors):
            self.found = Place(self._rank, self._micro_batch, self._looked, layer, what)

    def _forward(self, module: nn.Module, output: Any, name: str) -> None:
        for own, parameter in module.named_parameters(recurse=False):
            # Unsharded, a parameter is another tensor than the model's own: it is met here.
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                layer = f"{name}.{own}"
                handle: Any = parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient, layer=layer: self.look([gradient], layer, "gradient")
                )
                self._handles.append(handle)
        if isinstance(output, Tensor):
            self.look([output], name, "output")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element of this rank's part of the tensors is NaN or infinite."""
    return all(bool(torch.isfinite(local_of(one)).all()) for one in tensors)
