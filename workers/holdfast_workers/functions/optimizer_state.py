"""What a torch optimizer keeps, as tensors of a known layout before it has taken a step.

Most optimizers make their state in their first step. The layout of a job's state is fixed before,
so a step is taken for show (no gradient, no learning rate) and undone to the bit; what it made is
the template. A parameter that has no state yet is noted as such, and has none after a restore
either: so the true first step is like that of any fresh optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast_workers.functions.function_errors import FunctionError

_State = dict[str, Any]


class OptimizerState:
    """`named`: its parameters under the names they have in the job's state, in its own order."""

    def __init__(self, name: str, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]):
        self.optimizer = optimizer
        self._name = name
        self._named = list(named)
        self._template = _made_for_show(optimizer, [one for _, one in named])
        for (own, _), state in zip(self._named, self._template, strict=True):
            for key, value in state.items():
                if isinstance(value, Optimizer | list | dict):
                    raise FunctionError(
                        f"{name} keeps a {type(value).__name__} as {key!r} of {own}: only tensors "
                        "and numbers can be kept"
                    )

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, the tensor as it is now, and the parameter it belongs to."""
        for (own, parameter), template in zip(self._named, self._template, strict=True):
            live = self.optimizer.state.get(parameter) or {}
            for key, made in template.items():
                if isinstance(made, Tensor):
                    now = live.get(key)
                    tensor = now if isinstance(now, Tensor) else made
                    yield f"{self._name}.{key}.{own}", tensor, parameter

    def plain(self) -> dict[str, Any]:
        """All else: settings of its groups, numbers, and which parameters have no state yet."""
        without = [at for at, one in enumerate(self._named) if not self._has(one[1])]
        numbers = {
            str(at): {k: v for k, v in live.items() if not isinstance(v, Tensor)}
            for at, (_, parameter) in enumerate(self._named)
            if (live := self.optimizer.state.get(parameter))
        }
        return {
            "groups": _settings(self.optimizer),
            "numbers": {at: kept for at, kept in numbers.items() if kept},
            "without": "all" if len(without) == len(self._named) else without,
        }

    def put(self, plain: dict[str, Any]) -> None:
        """Follow what `plain` said; the tensors were written to before."""
        for group, settings in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            group.update(settings)
        without = plain["without"]
        for at, (_, parameter) in enumerate(self._named):
            if without == "all" or at in without:
                self.optimizer.state.pop(parameter, None)
                continue
            if not self._has(parameter):
                self.optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self._template[at].items()
                }
            self.optimizer.state[parameter].update(plain["numbers"].get(str(at), {}))

    def _has(self, parameter: Tensor) -> bool:
        return bool(self.optimizer.state.get(parameter))


def _settings(optimizer: Optimizer) -> list[_State]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _made_for_show(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[_State]:
    """What the optimizer keeps of each parameter; it and the parameters are left as they were."""
    if all(optimizer.state.get(one) for one in parameters):
        return [dict(optimizer.state[one]) for one in parameters]
    values = [one.detach().cpu().clone() for one in parameters]
    settings = _settings(optimizer)
    before = {one: _copied(state) for one, state in optimizer.state.items() if state}
    try:
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = 0.0
        for one in parameters:
            one.grad = torch.zeros_like(one)
        optimizer.step()
        return [dict(optimizer.state.get(one) or {}) for one in parameters]
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)
        with torch.no_grad():
            for one, value in zip(parameters, values, strict=True):
                one.grad = None
                one.copy_(value)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)


def _copied(state: _State) -> _State:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
