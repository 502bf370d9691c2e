"""Averages the gradients of a function's parameters over the ranks that read different samples.

For each parameter it is decided once, from the process groups that its wrapper or its shards use,
over which data axes its gradient has been averaged when a step is committed, and so over which it
still has to be. A parameter for which this cannot be decided is refused by its name. A rank that
did not use a parameter contributes zeros, as in DDP; a parameter that no rank used has no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.functions.replicated_modules import ReducingWrapper
from holdfast_workers.parallelize.mesh import SHARD_AXIS
from holdfast_workers.state.joined_axes import axes_of
from holdfast_workers.state.rank_state import local_of
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.recipe import World

DATA_AXES = (REPLICATED_AXIS, SHARD_AXIS)
"""The axes whose ranks read different samples, outermost first."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Reduced:
    """One parameter, and what remains to be done with its gradient."""

    name: str
    parameter: Tensor
    over: Axes
    """The data axes over which it still has to be averaged."""
    fills: bool
    """Whether ranks may lack the gradient and contribute zeros."""
    wrapper: ReducingWrapper | None = None
    """The wrapper that averages the gradient over other axes, in the last backward pass of most
    steps."""


class GradientReduction:
    """The reductions of all trained parameters, in a fixed order that is the same on all ranks."""

    def __init__(self, world: World, parameters: Sequence[Reduced]) -> None:
        self._world = world
        self._parameters = parameters

    @classmethod
    def of(
        cls,
        world: World,
        trained: Mapping[str, Tensor],
        modules: Iterable[nn.Module],
        wrappers: Iterable[ReducingWrapper],
    ) -> GradientReduction:
        """Decide for the parameters `trained` of `modules`. Raises FunctionError for one that
        cannot be classified."""
        modules = list(modules)
        _refuse_fsdp1(modules)
        by_wrapper = {
            id(parameter): wrapper for wrapper in wrappers for parameter in wrapper.parameters()
        }
        by_fsdp, known = _managed_by_fsdp(modules), _KnownAxes(world)
        return cls(
            world,
            [
                _decided(known, name, tensor, by_wrapper.get(id(tensor)), id(tensor) in by_fsdp)
                for name, tensor in trained.items()
            ],
        )

    def run(self, mesh: Callable[[], DeviceMesh]) -> None:
        """Average what remains. Collective; raises FunctionError, on all ranks, if the gradient of
        a parameter that FSDP or tensor parallelism divides is missing on some ranks."""
        if self._world.world_size == 1:
            return
        present = self._complete()
        for reduced in present:
            _settle_placements(reduced.parameter)
        remaining = [(reduced.parameter, self._remaining(reduced)) for reduced in present]
        for over in sorted({axes for _, axes in remaining if axes}):
            gradients = [local_of(_gradient(each)) for each, axes in remaining if axes == over]
            _average(gradients, self.group(over, mesh), _size(self._world, over))

    def _complete(self) -> list[Reduced]:
        """The parameters that have a gradient; one that only other ranks have is made of zeros."""
        flags = [reduced.parameter.grad is not None for reduced in self._parameters]
        counts = torch.tensor(flags, dtype=torch.int32, device=self._world.device)
        dist.all_reduce(counts)
        present = []
        for reduced, count in zip(self._parameters, counts.tolist(), strict=True):
            if count == 0:
                continue
            if count < self._world.world_size and not reduced.fills:
                raise FunctionError(
                    f"{reduced.name} has a gradient on {count} of {self._world.world_size} ranks "
                    "only: FSDP and tensor parallelism need the same parameters on every rank. "
                    "Use it on all ranks, e.g. times zero, or leave it whole"
                )
            if reduced.parameter.grad is None:
                reduced.parameter.grad = torch.zeros_like(reduced.parameter)
            present.append(reduced)
        return present

    def _remaining(self, reduced: Reduced) -> Axes:
        if reduced.wrapper is None or reduced.wrapper.has_averaged(reduced.parameter):
            return reduced.over
        return data_axes(self._world)

    def group(self, over: Axes, mesh: Callable[[], DeviceMesh]) -> dist.ProcessGroup | None:
        """The ranks along the data axes `over`; None: all. Collective at the first use."""
        if _size(self._world, over) == self._world.world_size:
            return None
        part = mesh()[over]
        return (part if part.ndim == 1 else part._flatten("data")).get_group()


def data_axes(world: World) -> Axes:
    """The axes of several ranks that read different samples, outermost first. Pure."""
    return tuple(axis for axis in DATA_AXES if world.size(axis) > 1)


def ranks_along(world: World, axes: Axes) -> tuple[int, ...]:
    """The ranks that differ from this one in `axes` at most, in ascending order. Pure."""
    ranges = [
        range(size) if axis in axes else [world.coordinate(axis)]
        for axis, size in world.mesh.items()
    ]
    sizes = list(world.mesh.values())
    ranks = []
    for coordinates in itertools.product(*ranges):
        rank = 0
        for size, coordinate in zip(sizes, coordinates, strict=True):
            rank = rank * size + coordinate
        ranks.append(rank)
    return tuple(ranks)


def axes_with(world: World, ranks: Sequence[int]) -> Axes | None:
    """The axes with more than one rank along which `ranks`, of which this is one, lie; None: they
    are no whole part of the mesh. Pure."""
    wide = [axis for axis, size in world.mesh.items() if size > 1]
    for count in range(len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            if ranks_along(world, axes) == tuple(ranks):
                return axes
    return None


class _KnownAxes:
    """The axes of wrappers and device meshes, each found once: many parameters share them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._of_meshes: dict[DeviceMesh, Axes] = {}
        self._of_wrappers: dict[ReducingWrapper, Axes] = {}

    def of_shards(self, name: str, parameter: Tensor) -> Axes:
        """The axes over which the device mesh of a DTensor extends. Raises FunctionError."""
        if not isinstance(parameter, DTensor):
            return ()
        mesh = parameter.device_mesh
        if mesh not in self._of_meshes:
            self._of_meshes[mesh] = _axes_of_mesh(self.world, name, mesh)
        return self._of_meshes[mesh]

    def of_wrapper(self, name: str, wrapper: ReducingWrapper) -> Axes:
        """Raises FunctionError."""
        if wrapper not in self._of_wrappers:
            self._of_wrappers[wrapper] = _axes_of_wrapper(self.world, name, wrapper)
        return self._of_wrappers[wrapper]


def _decided(
    known: _KnownAxes,
    name: str,
    parameter: Tensor,
    wrapper: ReducingWrapper | None,
    by_fsdp: bool,
) -> Reduced:
    divided, wide = known.of_shards(name, parameter), data_axes(known.world)
    if wrapper is not None:
        done = known.of_wrapper(name, wrapper)
    elif by_fsdp:
        done = divided
    elif set(divided) & set(wide):
        raise FunctionError(
            f"{name} is divided over {', '.join(divided)}, but not by FSDP: use ctx.shard() or "
            "fully_shard() for the axes with different samples, and other DTensors over 'tp' only"
        )
    else:
        done = ()
    over = tuple(axis for axis in wide if axis not in done)
    return Reduced(name, parameter, over, not divided, wrapper)


def _size(world: World, axes: Axes) -> int:
    return math.prod(world.size(axis) for axis in axes)


def _axes_of_wrapper(world: World, name: str, wrapper: ReducingWrapper) -> Axes:
    ranks = dist.get_process_group_ranks(wrapper.module.process_group)
    axes = axes_with(world, ranks)
    if axes is None or not set(axes) <= set(DATA_AXES):
        raise FunctionError(
            f"{name} is in a DistributedDataParallel over ranks {ranks}, which are not those that "
            "read different samples: pass process_group=ctx.mesh.get_group('dp_shard'), or do not "
            "wrap the model: step() averages gradients"
        )
    return axes


def check_divisions(world: World, tensors: Mapping[str, Tensor]) -> None:
    """Raises FunctionError for a tensor that is divided over another mesh than the job's."""
    known = _KnownAxes(world)
    for name, tensor in tensors.items():
        known.of_shards(name, tensor)


def _axes_of_mesh(world: World, name: str, mesh: DeviceMesh) -> Axes:
    coordinate = mesh.get_coordinate()
    found: list[str] = []
    for dim, dim_name in enumerate(mesh.mesh_dim_names or [""] * mesh.ndim):
        if mesh.size(dim) == 1:
            continue
        assert coordinate is not None
        place = [slice(None) if each == dim else at for each, at in enumerate(coordinate)]
        axes = axes_with(world, mesh.mesh[tuple(place)].tolist())
        named = [axis for axis in axes_of(dim_name) if world.mesh.get(axis, 1) > 1]
        if axes is None or list(axes) != named:
            raise FunctionError(
                f"{name} is divided over a device mesh with a dimension {dim_name!r} that is no "
                "axis of the job: take the mesh from ctx.mesh"
            )
        found += axes
    return tuple(found)


def _managed_by_fsdp(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the DTensors in modules that FSDP2 manages; it leaves ignored ones plain."""
    return {
        id(parameter)
        for module in modules
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for parameter in part.parameters()
        if isinstance(parameter, DTensor)
    }


def _refuse_fsdp1(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise FunctionError(
                "a module is wrapped in FullyShardedDataParallel, whose state cannot be brought to "
                "another number of ranks: use ctx.shard() or fully_shard()"
            )


def _settle_placements(parameter: Tensor) -> None:
    """Bring the gradient of a DTensor to the placements of its parameter: sequence parallelism
    leaves partial sums."""
    gradient = parameter.grad
    if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _average(gradients: Sequence[Tensor], group: dist.ProcessGroup | None, size: int) -> None:
    """Replace each of `gradients` by its mean over the `size` ranks of `group`."""
    for same in _by_dtype(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in same])
        flat /= size  # first, as in DDP: a sum of large gradients in half precision overflows
        dist.all_reduce(flat, group=group)
        means = torch.split(flat, [gradient.numel() for gradient in same])
        for gradient, mean in zip(same, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _by_dtype(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in sorted({str(gradient.dtype) for gradient in gradients}):
        yield [gradient for gradient in gradients if str(gradient.dtype) == dtype]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
