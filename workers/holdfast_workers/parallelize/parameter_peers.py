"""Sums and functions of whole parameters, of which each rank has a piece.

Peers are the ranks of one replica that have the same layers: those that differ only in `dp_shard`,
`cp` and `tp`. Replicas compute the same things apart from each other, so that the wrong result of a
faulty rank does not spread; and all sums are in the order of ranks, so that their bits are equal.
(An all-reduce may add in another order on each group of ranks.)

No process group is kept: those of the axes come from the mesh, and pieces travel over the default
group, in which ranks that are no peers send each other nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate, product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from holdfast_workers.optim.local_optimizer import ParameterPeers, WholeFunction
from holdfast_workers.parallelize.mesh import (
    CONTEXT_AXIS,
    PIPELINE_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
)
from holdfast_workers.state.joined_axes import axes_of
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

_Box = tuple[slice, ...]
_Division = tuple[tuple[int, ...], tuple[tuple[str, Placement], ...]]
"""Whole shape of a parameter, and its placement on each dimension of its mesh."""


class MeshPeers(ParameterPeers):
    """The peers of a rank in `world`; `parameters`: the model's, by name."""

    def __init__(self, world: World, mesh: DeviceMesh, parameters: Mapping[str, Tensor]) -> None:
        self._mesh = mesh
        self._world_size = world.world_size
        self._parameters = dict(parameters)
        axes = (SHARD_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
        self.axes: Sequence[str] = tuple(axis for axis in axes if world.size(axis) > 1)
        self._peers = peers_of(world)
        self._own = self._peers.index(world)
        self._boxes: dict[_Division, _Boxes] = {}

    def summed(self, values: Tensor, axis: str) -> Tensor:
        group = self._mesh.get_group(axis)
        ranks, count = group.size(), values.numel()
        part = -(-count // ranks)
        padded = values.new_zeros(ranks * part)
        padded[:count] = values
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=group)
        total = reduce(torch.add, received.view(ranks, part).unbind())
        dist.all_gather_into_tensor(padded, total.contiguous(), group=group)
        return padded[:count]

    def mapped(
        self,
        names: Sequence[str],
        pieces: Iterable[Tensor],
        function: WholeFunction,
        dtype: torch.dtype,
    ) -> Iterable[Tensor]:
        if len(self._peers) == 1:
            return map(function, pieces)
        shapes = [tuple(self._parameters[name].shape) for name in names]
        boxes = [self._boxes_of(name) for name in names]
        owners = owners_of([prod(shape) for shape in shapes], len(self._peers))
        # At any time there are two copies of what this rank holds or owns, and not more.
        wholes = self._gathered(pieces, shapes, boxes, owners, dtype)
        for index, whole in wholes.items():
            wholes[index] = function(whole)
        return self._returned(wholes, boxes, owners, dtype)

    def _gathered(
        self,
        pieces: Iterable[Tensor],
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[_Boxes],
        owners: Sequence[int],
        dtype: torch.dtype,
    ) -> dict[int, Tensor]:
        """The whole tensors that this rank owns, by their indices, of the pieces of all peers."""
        own = [index for index, owner in enumerate(owners) if owner == self._own]
        counts = [0] * len(self._peers)
        places = []  # of each piece, in the part for its owner
        for of_peers, owner in zip(boxes, owners, strict=True):
            places.append(counts[owner])
            counts[owner] += of_peers.first_sizes[self._own]
        starts = [*accumulate(counts, initial=0)]
        outgoing = self._empty((sum(counts),), dtype)
        for piece, of_peers, owner, place in zip(pieces, boxes, owners, places, strict=True):
            if of_peers.is_first[self._own]:
                at = starts[owner] + place
                outgoing[at : at + piece.numel()] = piece.reshape(-1)
        peers = range(len(self._peers))
        expected = [sum(boxes[index].first_sizes[peer] for index in own) for peer in peers]
        arriving = self._exchanged(outgoing, counts, expected)
        del outgoing
        wholes = {index: self._empty(shapes[index], dtype) for index in own}
        at = 0
        for peer, index in product(peers, own):
            if boxes[index].is_first[peer]:
                target = wholes[index][boxes[index].of[peer]]
                target.copy_(arriving[at : at + target.numel()].view(target.shape))
                at += target.numel()
        return wholes

    def _returned(
        self,
        wholes: dict[int, Tensor],
        boxes: Sequence[_Boxes],
        owners: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """This rank's pieces of the wholes of all owners; `wholes`, of this one, are let go of."""
        peers = range(len(self._peers))
        counts = [sum(boxes[index].sizes[peer] for index in wholes) for peer in peers]
        outgoing = self._empty((sum(counts),), dtype)
        at = 0
        for peer, index in product(peers, wholes):
            box = boxes[index]
            part = outgoing[at : at + box.sizes[peer]]
            part.view(box.shapes[peer]).copy_(wholes[index][box.of[peer]])
            at += box.sizes[peer]
        wholes.clear()
        expected = [0] * len(self._peers)
        places = []  # of each piece, in the part of its owner
        for of_peers, owner in zip(boxes, owners, strict=True):
            places.append(expected[owner])
            expected[owner] += of_peers.sizes[self._own]
        arriving = self._exchanged(outgoing, counts, expected)
        starts = [*accumulate(expected, initial=0)]
        pieces = []
        for of_peers, owner, place in zip(boxes, owners, places, strict=True):
            at = starts[owner] + place
            piece = arriving[at : at + of_peers.sizes[self._own]]
            pieces.append(piece.view(of_peers.shapes[self._own]))
        return pieces

    def _exchanged(
        self, outgoing: Tensor, counts: Sequence[int], expected: Sequence[int]
    ) -> Tensor:
        """Send the peers, in their order, parts of `outgoing` with so many elements each, and
        return what arrives: from each of them as many elements as are expected."""
        arriving = self._empty((sum(expected),), outgoing.dtype)
        dist.all_to_all_single(
            arriving.view(torch.uint8),
            outgoing.view(torch.uint8),
            self._bytes_by_rank(expected, outgoing.dtype),
            self._bytes_by_rank(counts, outgoing.dtype),
        )
        return arriving

    def _bytes_by_rank(self, counts: Sequence[int], dtype: torch.dtype) -> list[int]:
        """For each rank of the world the bytes of so many elements; `counts`: by peer."""
        sizes = [0] * self._world_size
        for peer, count in zip(self._peers, counts, strict=True):
            sizes[peer.rank] = count * dtype.itemsize
        return sizes

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._mesh.device_type)

    def _boxes_of(self, name: str) -> _Boxes:
        """The boxes that the peers have of a parameter. They are found once for all parameters
        that are divided alike: among hundreds of peers that takes long."""
        parameter = self._parameters[name]
        placed: tuple[tuple[str, Placement], ...] = ()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placed = tuple(zip(names, parameter.placements, strict=True))
        division = tuple(parameter.shape), placed
        if division not in self._boxes:
            self._boxes[division] = _Boxes([_box(parameter, peer) for peer in self._peers])
        return self._boxes[division]


class _Boxes:
    """The boxes that the peers, in their order, have of a parameter."""

    def __init__(self, boxes: Sequence[_Box]) -> None:
        self.of = boxes
        self.shapes = [tuple(each.stop - each.start for each in box) for box in boxes]
        self.sizes = [prod(shape) for shape in self.shapes]
        """Elements of each box."""
        edges = [tuple((each.start, each.stop) for each in box) for box in boxes]
        first = {of_box: peer for peer, of_box in reversed([*enumerate(edges)])}
        self.is_first = [first[of_box] == peer for peer, of_box in enumerate(edges)]
        """Whether no peer before this one has the same box."""
        rows = zip(self.sizes, self.is_first, strict=True)
        self.first_sizes = [size if is_first else 0 for size, is_first in rows]


def peers_of(world: World) -> list[World]:
    """The places of the ranks, in their order, of this one's replica and stage."""
    places = [replace(world, rank=rank) for rank in range(world.world_size)]
    axes = (REPLICATED_AXIS, PIPELINE_AXIS)
    return [
        place
        for place in places
        if all(place.coordinate(axis) == world.coordinate(axis) for axis in axes)
    ]


def owners_of(costs: Sequence[int], ranks: int) -> list[int]:
    """The owner of each tensor among `ranks`: the most costly first, to the rank with least. Pure;
    of equal ones, the first."""
    load, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners


def _box(parameter: Tensor, place: World) -> _Box:
    """The box of a parameter that the rank at `place` has."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in shape)
    mesh = parameter.device_mesh
    local, offsets = _compute_local_shape_and_global_offset(
        shape,
        tuple(mesh.shape),
        [_index(place, axes_of(name)) for name in mesh.mesh_dim_names or ()],
        parameter.placements,
    )
    return tuple(slice(at, at + size) for at, size in zip(offsets, local, strict=True))


def _index(place: World, axes: Sequence[str]) -> int:
    """The coordinate on a dimension that consists of `axes`, outermost first."""
    index = 0
    for axis in axes:
        index = index * place.size(axis) + place.coordinate(axis)
    return index
