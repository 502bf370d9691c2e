"""A user's function in evaluations: what it sums over the targets of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.functions.function_recipe import load_function
from holdfast_workers.program_metrics.metric_names import MAX_NAMES, NAME
from holdfast_workers.training.evaluation import OWN_METRICS


class EvaluationFunction:
    """Calls the function, and adds up what it returns until `take`."""

    def __init__(self, reference: str | None) -> None:
        """`reference`: `package.module:name`; None: no function. Raises what the import raises, and
        FunctionError."""
        self._function: Callable[[Tensor, Tensor], object] | None = None
        if reference is not None:
            self._function = cast(Callable[[Tensor, Tensor], object], load_function(reference))
        self._sums: dict[str, float] | None = None

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Call the function with the outputs and targets of a micro-batch. Raises FunctionError,
        and what the function raises."""
        if self._function is None:
            return
        found: object = self._function(outputs, targets)
        if not isinstance(found, Mapping):
            raise FunctionError(
                f"the function of evaluate returned a {type(found).__qualname__}: it must return "
                "sums by name, such as {'right': 3}"
            )
        values = {OWN_METRICS.format(_checked(name)): float(each) for name, each in found.items()}
        if self._sums is None:
            self._sums = dict.fromkeys(values, 0.0)
        if values.keys() != self._sums.keys() or len(values) > MAX_NAMES:
            raise FunctionError(
                f"the function of evaluate returned {sorted(found)}: it must return the same names "
                f"for every micro-batch, {MAX_NAMES} at most"
            )
        for name, value in values.items():
            self._sums[name] += value

    def take(self) -> dict[str, float] | None:
        """The sums since the last call; None: the function was not called."""
        sums, self._sums = self._sums, None
        return sums


def _checked(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(OWN_METRICS.format(name)):
        raise FunctionError(
            f"the function of evaluate returned {name!r}: a name has letters, digits and any of "
            "_ . / -, up to 59 in all"
        )
    if name in ("loss", "perplexity"):
        raise FunctionError(f"{name!r} is evaluated by Holdfast itself: choose another name")
    return name
