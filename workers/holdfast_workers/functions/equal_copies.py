"""Compares the parts of a function's state that several ranks hold, which must be equal there.

A rank's state says for each tensor which part of it the rank holds; ranks with the same part of the
same tensor must have the same bytes, or a restored or resized job would continue with the values of
one of them. They are compared by their hashes when a function begins, after its first steps, and
from time to time: so a state that differs is found while it has cost little. Objects may differ, as
each rank gets its own back; that they do is worth a line, because on another mesh it does not.
Buffers of modules (running statistics) differ by nature, and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import xxhash

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.parallelize.mesh import TENSOR_AXIS
from holdfast_workers.state.rank_state import StateTensor
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.state.strided_bytes import host_bytes
from holdfast_workers.training.recipe import World

COMPARED_EVERY = 64
"""Steps of an attempt between two comparisons, after more frequent ones."""
FIRST_STEPS = 2
"""Steps of an attempt after which replicas that differ are the function's doing: later, they are
compared by their digests, which tell a device that computes wrongly."""


@dataclass(frozen=True)
class HeldPart:
    """The part of a tensor that a rank holds."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    apart: int = 0
    """Ranks with another number are not compared with this one."""
    may_differ: bool = False

    @staticmethod
    def of(piece: StateTensor, apart: int) -> HeldPart:
        box, dtype = piece.box, str(piece.tensor.dtype)
        return HeldPart(
            piece.name, dtype, box.global_shape, box.offsets, box.shape, apart, piece.local
        )


class EqualCopies:
    """The parts of all ranks of `world`, gathered once."""

    def __init__(self, world: World, held: Sequence[Sequence[HeldPart]]) -> None:
        """`held`: by rank. Raises FunctionError if the ranks do not have the same tensors."""
        _check_same_tensors(held)
        self._world = world
        self._parts = held[world.rank]
        self._groups = [groups_of(parts) for parts in zip(*held, strict=True)]
        self._apart = [replace(world, rank=r).coordinate(REPLICATED_AXIS) for r in range(len(held))]

    @classmethod
    def gather(
        cls, world: World, pieces: Iterable[StateTensor], *, repeatable: bool = True
    ) -> EqualCopies:
        """Collective. If a computation is not `repeatable`, ranks of `tp`, which each compute the
        gradient of what they hold alike, may differ in the last bits, and are not compared."""
        apart = 0 if repeatable else world.coordinate(TENSOR_AXIS)
        mine = [HeldPart.of(piece, apart) for piece in pieces]
        held: list[list[HeldPart]] = [mine] * world.world_size
        if world.world_size > 1:
            dist.all_gather_object(held, mine)
        return cls(world, held)

    def compare(self, pieces: Iterable[StateTensor], *, replicas: bool = True) -> list[str]:
        """Compare the present values, and return the names of the objects that differ. Collective;
        raises FunctionError, on all ranks, if anything else does. Without `replicas`, ranks that
        differ in `dp_replicate` are not compared with each other."""
        compared = self._groups if replicas else [self._without_replicas(g) for g in self._groups]
        if not any(compared):
            return []
        mine = [
            _hash(piece.tensor) if any(self._world.rank in group for group in groups) else 0
            for piece, groups in zip(pieces, compared, strict=True)
        ]
        own = torch.tensor(mine, dtype=torch.int64, device=self._world.device)
        hashes = [torch.empty_like(own) for _ in range(self._world.world_size)]
        dist.all_gather(hashes, own)
        by_part = list(zip(*(each.tolist() for each in hashes), strict=True))
        objects: dict[str, None] = {}
        for part, groups, values in zip(self._parts, compared, by_part, strict=True):
            for differing in filter(None, (first_difference(group, values) for group in groups)):
                if not part.may_differ:
                    raise FunctionError(_sentence(part.name, *differing))
                objects[part.name] = None
        return list(objects)

    def _without_replicas(self, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        divided: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for group in groups:
            for rank in group:
                divided.setdefault((group, self._apart[rank]), []).append(rank)
        return [tuple(ranks) for ranks in divided.values() if len(ranks) > 1]


def is_due(step_of_attempt: int) -> bool:
    """Whether to compare after this step, counted from 1 in each attempt. Pure."""
    early = step_of_attempt < COMPARED_EVERY and step_of_attempt & (step_of_attempt - 1) == 0
    return early or step_of_attempt % COMPARED_EVERY == 0


def groups_of(parts: Sequence[HeldPart]) -> list[tuple[int, ...]]:
    """The groups of several ranks that hold the same part of one tensor; `parts` by rank. Pure."""
    ranks: dict[HeldPart, list[int]] = {}
    for rank, part in enumerate(parts):
        ranks.setdefault(part, []).append(rank)
    return [tuple(group) for group in ranks.values() if len(group) > 1]


def first_difference(group: Sequence[int], hashes: Sequence[int]) -> tuple[int, int] | None:
    """The first rank of `group` and one whose hash differs from its; `hashes` by rank. Pure."""
    return next(((group[0], rank) for rank in group if hashes[rank] != hashes[group[0]]), None)


def _check_same_tensors(held: Sequence[Sequence[HeldPart]]) -> None:
    def known(parts: Sequence[HeldPart]) -> Mapping[str, object]:
        return {part.name: (part.dtype, part.global_shape) for part in parts}

    first = known(held[0])
    for rank, parts in enumerate(held):
        other = known(parts)
        name = next((n for n in [*first, *other] if first.get(n) != other.get(n)), None)
        if name is not None:
            raise FunctionError(
                f"{name} is {_described(first.get(name))} on rank 0 and "
                f"{_described(other.get(name))} on rank {rank}: register the same state on every "
                "rank, with the same shapes; a parameter that ranks divide must be a DTensor"
            )
        if list(first) != list(other):
            raise FunctionError(
                f"rank {rank} has registered its state in another order than rank 0"
            )


def _described(known: object) -> str:
    return "missing" if known is None else " ".join(map(str, known))  # type: ignore[call-overload]


def _sentence(name: str, first: int, second: int) -> str:
    return (
        f"{name} differs between rank {first} and rank {second}, which must hold the same values. "
        "Register only what is equal on all ranks, and change it in the same way on all of them; a "
        "parameter that ranks divide must be a DTensor. If the function does both, a device "
        "computes wrongly"
    )


def _hash(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(host_bytes(tensor).data) - (1 << 63)
