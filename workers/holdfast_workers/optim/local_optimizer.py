"""What all optimizers have in common: they work on the local pieces of a rank, in place.

The state exists from the start, so that its layout is known and can be read before the first step.
It consists of moments, each of which belongs to a parameter. The number of updates is the step of
the run and is no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

WholeFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LocalParameter:
    """A rank's piece of a parameter, and how it is optimized."""

    name: str
    tensor: Tensor
    """The piece, which is updated in place; it may be empty."""
    whole_shape: tuple[int, ...]
    weight_decay: float
    lr_scale: float = 1.0
    sharded: Mapping[str, int] = field(default_factory=dict)
    """The mesh axes that divide the parameter, each with the dimension that it divides."""
    in_block: bool = False
    """Whether it belongs to a block of the model, and not to what is before or after them."""

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions or more; otherwise it is a vector."""
        return len(self.whole_shape) > 1


@dataclass(frozen=True, eq=False)
class Moment:
    """A state tensor of a parameter: the same piece of a tensor of the same whole shape."""

    kind: str
    """The name of all moments of its kind, such as `exp_avg`."""
    parameter: LocalParameter
    tensor: Tensor
    reduced: int | None = None
    """A dimension in which the moment has size 1. Ranks that differ only there hold it alike."""


class ParameterPeers(Protocol):
    """The ranks that hold the other pieces of this rank's parameters.

    A call is collective over them; the results have the same bits on all ranks that hold the same
    piece, also in other replicas.
    """

    axes: Sequence[str]
    """The mesh axes with several ranks that may divide a parameter."""

    def summed(self, values: Tensor, axis: str) -> Tensor:
        """The elementwise sum of a vector over an axis."""
        ...

    def mapped(
        self,
        names: Sequence[str],
        pieces: Iterable[Tensor],
        function: WholeFunction,
        dtype: torch.dtype,
    ) -> Iterable[Tensor]:
        """This rank's pieces of `function(whole)`, which has the whole's shape and dtype. `pieces`:
        of tensors of `dtype` that are divided like the parameters of these names; each is taken
        when it is needed, and may be let go of then."""
        ...


class NoPeers(ParameterPeers):
    """Of a rank that holds all of its parameters."""

    axes: Sequence[str] = ()

    def summed(self, values: Tensor, axis: str) -> Tensor:
        raise ValueError(f"nothing is divided over {axis}")

    def mapped(
        self,
        names: Sequence[str],
        pieces: Iterable[Tensor],
        function: WholeFunction,
        dtype: torch.dtype,
    ) -> Iterable[Tensor]:
        return map(function, pieces)


class LocalOptimizer(ABC):
    """An optimizer of `parameters`, whose tensors it updates in place."""

    def __init__(self, parameters: Sequence[LocalParameter]) -> None:
        self.parameters = list(parameters)
        self.moments: list[Moment] = []
        self.steps_taken = 0
        """The number of updates made so far."""

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of updates made so far, which some updates depend on."""
        self.steps_taken = steps

    def zero_state(self) -> None:
        for moment in self.moments:
            moment.tensor.zero_()
        self.set_steps_taken(0)

    @abstractmethod
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Apply one update with `gradients`, in the order of `parameters`. They may be changed."""

    def _add_moments(
        self, kind: str, parameters: Sequence[LocalParameter], reduced: int | None = None
    ) -> list[Tensor]:
        """Create a moment of each of `parameters`, with zeros."""
        added = [Moment(kind, each, _zeros(each.tensor, reduced), reduced) for each in parameters]
        self.moments += added
        return [moment.tensor for moment in added]


def _zeros(tensor: Tensor, reduced: int | None) -> Tensor:
    if reduced is None:
        return torch.zeros_like(tensor)
    shape = list(tensor.shape)
    shape[reduced] = 1
    return tensor.new_zeros(shape)


def squared_norms(
    peers: ParameterPeers, parameters: Sequence[LocalParameter], *lists: Sequence[Tensor]
) -> list[list[float]]:
    """For each of `lists`, the squared norm of each whole tensor, of which a list has this rank's
    pieces in the order of `parameters`. Collective."""
    if not parameters:
        return [[] for _ in lists]
    # One tensor at a time, so that equal pieces have equal norms in any company.
    norms = torch.stack([torch.linalg.vector_norm(tensor) for each in lists for tensor in each])
    repeated = list(parameters) * len(lists)
    sums = summed_vectors(peers, repeated, torch.split(norms.double().square(), 1))
    values: list[float] = sums.tolist()
    count = len(parameters)
    return [values[start : start + count] for start in range(0, len(values), count)]


def summed_vectors(
    peers: ParameterPeers,
    parameters: Sequence[LocalParameter],
    vectors: Sequence[Tensor],
    dimension: int | None = None,
) -> Tensor:
    """The sums of a vector for each of `parameters`, over the axes that divide the parameter or
    only its `dimension`, one after another in a tensor. Collective."""
    sizes = [vector.numel() for vector in vectors]
    values = torch.cat(list(vectors))
    for axis in peers.axes:
        divided = [
            axis in each.sharded and dimension in (None, each.sharded[axis]) for each in parameters
        ]
        flags = torch.tensor(divided, device=values.device)
        mask = flags.repeat_interleave(torch.tensor(sizes, device=values.device))
        # All ranks of the axis have the same mask, also if nothing is divided.
        if any(divided):
            values = values.masked_scatter(mask, peers.summed(values[mask], axis))
    return values
