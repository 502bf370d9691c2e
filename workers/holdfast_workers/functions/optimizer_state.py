"""The state of a torch optimizer as tensors with a known layout, even before its first step.

Most optimizers create their state in their first step, but the layout of a job's state is fixed
before. So a dry step (zero gradients, learning rate 0) is taken and undone exactly; the state that
it created is the template. A parameter without state is recorded as such and has no state after a
restore either, so the real first step is the same as that of any new optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast_workers.functions.function_errors import FunctionError

_State = dict[str, Any]
_SPARSE = (
    "which cannot be averaged over ranks, clipped or checked: use sparse=False (of nn.Embedding)"
)


class OptimizerState:
    """`named`: the optimizer's parameters in its own order, with their names in the job's state."""

    def __init__(self, name: str, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]):
        self.optimizer = optimizer
        self._name = name
        self._named = list(named)
        _refuse_closures(name, optimizer)
        self._template = _dry_step_state(name, optimizer, [parameter for _, parameter in named])
        for (parameter_name, _), state in zip(self._named, self._template, strict=True):
            for key, value in state.items():
                if isinstance(value, Optimizer | list | dict):
                    raise FunctionError(
                        f"{name} stores a {type(value).__name__} as {key!r} of {parameter_name}: "
                        "only tensors and numbers can be saved"
                    )

    def tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The state tensors, each with its name, the current tensor, and its parameter."""
        for (parameter_name, parameter), template in zip(self._named, self._template, strict=True):
            live = self.optimizer.state.get(parameter) or {}
            for key, initial in template.items():
                if isinstance(initial, Tensor):
                    current = live.get(key)
                    tensor = current if isinstance(current, Tensor) else initial
                    yield f"{self._name}.{key}.{parameter_name}", tensor, parameter

    def plain(self) -> dict[str, Any]:
        """The rest of the state: settings of the groups, numbers, and the parameters without state
        (as indices)."""
        self._refuse_unknown_state()
        without = [i for i, (_, parameter) in enumerate(self._named) if not self._has(parameter)]
        numbers = {
            str(index): {k: v for k, v in live.items() if not isinstance(v, Tensor)}
            for index, (_, parameter) in enumerate(self._named)
            if (live := self.optimizer.state.get(parameter))
        }
        return {
            "groups": _settings(self.optimizer),
            "numbers": {index: values for index, values in numbers.items() if values},
            "without": "all" if len(without) == len(self._named) else without,
        }

    def _refuse_unknown_state(self) -> None:
        """Raises FunctionError for state that the dry step did not show: it has no place in the
        layout."""
        known = {id(parameter) for _, parameter in self._named}
        if other := next((key for key in self.optimizer.state if id(key) not in known), None):
            raise FunctionError(
                f"{self._name} keeps state under {other!r}, which is no parameter of it and would "
                "not be saved: keep it in its param_groups"
            )
        for (parameter_name, parameter), template in zip(self._named, self._template, strict=True):
            for key, value in (self.optimizer.state.get(parameter) or {}).items():
                if isinstance(value, Tensor) and not isinstance(template.get(key), Tensor):
                    raise FunctionError(
                        f"{self._name} has created {key!r} of {parameter_name} after its first "
                        "step, too late to be saved: create the optimizer with settings with which "
                        "its first step creates all its state (as a momentum above 0)"
                    )

    def restore_plain(self, plain: dict[str, Any]) -> None:
        """Restore the value of `plain`; the tensors have already been written."""
        for group, settings in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            group.update(settings)
        without = plain["without"]
        for index, (_, parameter) in enumerate(self._named):
            if without == "all" or index in without:
                self.optimizer.state.pop(parameter, None)
                continue
            if not self._has(parameter):
                self.optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self._template[index].items()
                }
            self.optimizer.state[parameter].update(plain["numbers"].get(str(index), {}))

    def _has(self, parameter: Tensor) -> bool:
        return bool(self.optimizer.state.get(parameter))


def _settings(optimizer: Optimizer) -> list[_State]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _refuse_closures(name: str, optimizer: Optimizer) -> None:
    try:
        # Of the class: a scheduler replaces the object's own by a function of another signature.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise FunctionError(
            f"{name} ({type(optimizer).__name__}) computes the loss several times in a step, by a "
            "closure; a step here is computed once, and all ranks agree on it: use an optimizer "
            "whose step() needs no closure"
        ) from None


def refuse_sparse_gradients(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises FunctionError for the first parameter that has one."""
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise FunctionError(f"the gradient of {name} is sparse, {_SPARSE}")


def _take_dry_step(name: str, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.grad = torch.zeros_like(parameter)
    before = _own_numbers(optimizer)
    try:
        with _without_hooks(optimizer):
            optimizer.step()
    except Exception as error:
        if _takes_sparse_gradients(optimizer, parameters):
            raise FunctionError(
                f"{name} ({type(optimizer).__name__}) takes only sparse gradients, {_SPARSE}, and "
                "an optimizer of dense ones"
            ) from error
        raise
    for attribute, value in _own_numbers(optimizer).items():
        if before.get(attribute, value) != value:
            raise FunctionError(
                f"{name} ({type(optimizer).__name__}) counts in its attribute {attribute!r}, which "
                "would not be saved: keep it in its param_groups"
            )


def _own_numbers(optimizer: Optimizer) -> dict[str, object]:
    """The public attributes of the optimizer that are numbers."""
    return {k: v for k, v in vars(optimizer).items() if k[0] != "_" and isinstance(v, int | float)}


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Hooks of the user are for real steps, e.g. to update an average of the weights."""
    hooks: list[dict[int, Any]] = [
        getattr(optimizer, "_optimizer_step_pre_hooks"),  # noqa: B009
        getattr(optimizer, "_optimizer_step_post_hooks"),  # noqa: B009
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, former in zip(hooks, kept, strict=True):
            each.update(former)


def _takes_sparse_gradients(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter).to_sparse()
        with _without_hooks(optimizer):
            optimizer.step()
    except Exception:  # whatever it is: they are not the reason for the first exception
        return False
    return True


def _dry_step_state(name: str, optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[_State]:
    """The state of each parameter after a dry step; optimizer and parameters stay unchanged."""
    if all(optimizer.state.get(parameter) for parameter in parameters):
        return [dict(optimizer.state[parameter]) for parameter in parameters]
    values = [parameter.detach().cpu().clone() for parameter in parameters]
    settings = _settings(optimizer)
    before = {parameter: _copied(state) for parameter, state in optimizer.state.items() if state}
    try:
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = 0.0
        _take_dry_step(name, optimizer, parameters)
        return [dict(optimizer.state.get(parameter) or {}) for parameter in parameters]
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = None
                parameter.copy_(value)
        for group, original in zip(optimizer.param_groups, settings, strict=True):
            group.update(original)


def _copied(state: _State) -> _State:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
