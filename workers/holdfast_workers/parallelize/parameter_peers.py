"""Sums and functions of whole parameters, of which each rank has a piece.

Peers are the ranks of one replica that have the same layers: those that differ only in `dp_shard`,
`cp` and `tp`. Replicas compute the same things apart from each other, so that the wrong result of a
faulty rank does not spread; and all sums are in the order of ranks, so that their bits are equal.
(An all-reduce may add in another order on each group of ranks.)

No process group is kept: those of the axes come from the mesh, and pieces travel over the default
group, in which ranks that are no peers send each other nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
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
        self, names: Sequence[str], pieces: Sequence[Tensor], function: WholeFunction
    ) -> list[Tensor]:
        if len(self._peers) == 1:
            return [function(piece) for piece in pieces]
        shapes = [tuple(self._parameters[name].shape) for name in names]
        owners = owners_of([prod(shape) for shape in shapes], len(self._peers))
        boxes = [self._boxes_of(name) for name in names]
        wholes = self._gathered(pieces, shapes, boxes, owners)
        results = {index: function(whole) for index, whole in wholes.items()}
        return self._returned(results, pieces, boxes, owners)

    def _gathered(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        boxes: Sequence[_Boxes],
        owners: Sequence[int],
    ) -> dict[int, Tensor]:
        """The whole tensors that this rank owns, by their indices, of the pieces of all peers."""
        sent: list[list[Tensor]] = [[] for _ in self._peers]
        for piece, of_peers, owner in zip(pieces, boxes, owners, strict=True):
            if of_peers.is_first[self._own]:
                sent[owner].append(piece)
        own = [index for index, owner in enumerate(owners) if owner == self._own]
        wholes = {index: pieces[index].new_empty(shapes[index]) for index in own}
        places = [
            [wholes[index][boxes[index].of[peer]] for index in own if boxes[index].is_first[peer]]
            for peer in range(len(self._peers))
        ]
        self._exchange(pieces[0], sent, places)
        return wholes

    def _returned(
        self,
        results: Mapping[int, Tensor],
        pieces: Sequence[Tensor],
        boxes: Sequence[_Boxes],
        owners: Sequence[int],
    ) -> list[Tensor]:
        """This rank's pieces of the results of all owners."""
        sent = [
            [result[boxes[index].of[peer]] for index, result in results.items()]
            for peer in range(len(self._peers))
        ]
        own = [torch.empty_like(piece) for piece in pieces]
        places: list[list[Tensor]] = [[] for _ in self._peers]
        for piece, owner in zip(own, owners, strict=True):
            places[owner].append(piece)
        self._exchange(pieces[0], sent, places)
        return own

    def _exchange(
        self, example: Tensor, sent: Sequence[list[Tensor]], places: Sequence[list[Tensor]]
    ) -> None:
        """Send each peer its tensors, and copy those of each peer to `places`. All are of the dtype
        and device of `example`."""
        outgoing = _flat([tensor for tensors in sent for tensor in tensors], example)
        arriving = example.new_empty(sum(each.numel() for tensors in places for each in tensors))
        dist.all_to_all_single(
            arriving.view(torch.uint8),
            outgoing.view(torch.uint8),
            self._byte_counts(places),
            self._byte_counts(sent),
        )
        targets = [tensor for tensors in places for tensor in tensors]
        parts = torch.split(arriving, [target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))

    def _byte_counts(self, tensors: Sequence[list[Tensor]]) -> list[int]:
        """The bytes for each rank of the world."""
        counts = [0] * self._world_size
        for peer, of_peer in zip(self._peers, tensors, strict=True):
            counts[peer.rank] = sum(each.numel() * each.element_size() for each in of_peer)
        return counts

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
        found: set[tuple[tuple[int, int], ...]] = set()
        self.is_first = []
        """Whether no peer before this one has the same box."""
        for box in boxes:
            edges = tuple((each.start, each.stop) for each in box)
            self.is_first.append(edges not in found)
            found.add(edges)


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


def _flat(tensors: Sequence[Tensor], example: Tensor) -> Tensor:
    if not tensors:
        return example.new_empty(0)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


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
