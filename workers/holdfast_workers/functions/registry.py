"""The registered objects of a function as the state of its rank, with one layout.

Parameters of an optimizer change only in the context's `step`, so they are copied while the next
step computes. A function may change everything else (buffers, averages, schedulers) at any time,
so that is copied at once, when a step is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast_workers.functions.encoded_objects import EncodedObjects
from holdfast_workers.functions.encoding import decode, encode
from holdfast_workers.functions.forgotten_parts import refuse_forgotten_parts
from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.functions.module_parts import BufferPlace, ExtraState, ModuleParts
from holdfast_workers.functions.optimizer_state import OptimizerState, refuse_sparse_gradients
from holdfast_workers.functions.replicated_modules import (
    ReducingWrapper,
    wrappers_in,
)
from holdfast_workers.functions.state_trial import (
    lost_by,
    random_numbers_kept,
    refuse_unsaveable,
    try_object,
    try_tensors,
)
from holdfast_workers.parallelize.shard import (
    has_unreduced_gradients,
    set_last_micro_batch,
)
from holdfast_workers.state.layout import OBJECT_PREFIX, StateLayout
from holdfast_workers.state.object_room import differ_in_room
from holdfast_workers.state.rank_state import (
    RankState,
    ShardBox,
    Snapshot,
    StateTensor,
    local_of,
    shard_box_of,
)
from holdfast_workers.state.strided_bytes import assign, assign_bytes, flat_bytes, is_flat
from holdfast_workers.training.rank_log import log_lost_state

_RESERVED = ("guards", "data", "holdfast", "object")


class Registry:
    """`coordinates` are this rank's coordinates on every axis of the mesh."""

    def __init__(self, coordinates: Mapping[str, int]) -> None:
        self._coordinates = coordinates
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.wrappers: list[ReducingWrapper] = []
        """Wrappers around registered modules, or parts of them."""
        self._objects: dict[str, Any] = {}
        self._own: list[StateTensor] = []
        self._trained: dict[str, Tensor] = {}
        self._other: dict[str, Tensor] = {}
        self._places: dict[str, BufferPlace] = {}
        self._copies: dict[str, Tensor] = {}
        self._optimizer_states: list[OptimizerState] = []
        self._encoded = EncodedObjects()
        self._state: RankState | None = None
        self._built_on: list[int] = []
        self._stepped: list[int] = []
        self._stepping = False
        self._parts = ModuleParts({})
        self._versions: list[int] = []
        self._copies_at_once = True
        """Whether trained parameters are copied when they are frozen, not while they are read."""

    # --- registration ---------------------------------------------------------------------------

    def add(self, name: str, part: Any) -> None:
        """Register one part. Raises FunctionError if it has no state that can be saved."""
        if not name.isidentifier():
            raise FunctionError(
                f"{name!r} is not a valid name for a part of the state: use an identifier"
            )
        if name in (*self.modules, *self.optimizers, *self._objects, *_RESERVED):
            raise FunctionError(f"the state already has a part {name!r}: choose another name")
        if isinstance(part, nn.Module):
            known = {id(wrapper.module) for wrapper in self.wrappers}
            new = [each for each in wrappers_in(part) if id(each) not in known]
            self.wrappers += map(ReducingWrapper, new)
            self.modules[name] = part.module if isinstance(part, DistributedDataParallel) else part
        elif isinstance(part, Optimizer):
            self.optimizers[name] = part
            part.register_step_pre_hook(self._refuse_outside_steps)
        elif callable(getattr(part, "state_dict", None)) and hasattr(part, "load_state_dict"):
            self._objects[name] = part
        else:
            raise FunctionError(
                f"{name} ({type(part).__qualname__}) has no state_dict and load_state_dict: "
                "register modules, optimizers, and objects that have both"
            )

    def collect(self) -> None:
        """End the registration: find the tensors of what is registered."""
        for wrapper in self.wrappers:
            wrapper.reduce_each_gradient()
        self._parts = ModuleParts(self.modules)
        self._stepped = self._stepped_parameters()
        owned = set(self._stepped)
        names: dict[int, str] = {}
        for name, tensor in self._parts.tensors():
            if id(tensor) not in names:  # of a tensor with several names, the first counts
                names[id(tensor)] = name
                group = self._trained if id(tensor) in owned else self._other
                group[name] = tensor
        places = self._parts.buffer_places()
        self._places = {name: place for name, place in places if name in self._other}
        refuse_unsaveable(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers of the modules."""
        return {**self._trained, **self._other}

    def fix_layout(self, own: Sequence[StateTensor]) -> None:
        """Lay out the state, after `collect`. `own` are the parts that Holdfast adds itself."""
        self._own = list(own)
        names = {id(tensor): name for name, tensor in self._trained.items()}
        with self.stepping():
            self._optimizer_states = [
                OptimizerState(
                    name, optimizer, [(_named(names, p, name), p) for p in _parameters(optimizer)]
                )
                for name, optimizer in self.optimizers.items()
            ]
        for prefix, module in self.modules.items():
            if extra := ExtraState.of(module):
                self._objects[f"{prefix}.extra_state"] = extra
        for name, tensor in self._other.items():
            local = local_of(tensor)
            self._copies[name] = torch.empty_like(local, memory_format=torch.contiguous_format)
        self._refresh()
        self._rebuild()

    def broadcast_from(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Copy the values that `rank` of `group` has of all unsharded tensors to the others.
        Collective. Buffers stay: they are each rank's own."""
        for name, tensor in self.tensors().items():
            if not isinstance(tensor, DTensor) and name not in self._places:
                content = flat_bytes(tensor)  # so also of a dtype that the backend does not know
                dist.broadcast(content, src=rank, group=group)
                if not is_flat(tensor):
                    assign_bytes(tensor, content)

    def equal_pieces(self) -> list[StateTensor]:
        """The parts of the present state that are equal on all ranks that hold them, parameters and
        optimizers; and each object, which may be `local`, as its encoding, whatever its room."""
        self._refresh()
        encodings, box = self._encoded.encodings(), ShardBox((), (), (), primary=True)
        others = {piece.name for piece in self._own} | {OBJECT_PREFIX + name for name in encodings}
        pieces = [p for p in self._pieces() if not (p.local or p.name in others)]
        for name, raw in encodings.items():
            content = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            local = name in self._objects
            pieces.append(StateTensor(OBJECT_PREFIX + name, content, box, False, local))
        return pieces

    def try_state(self) -> None:
        """Raise FunctionError if a part of the state would not come back as it is saved, or is not
        registered. Call it before a first state is loaded."""
        try_tensors(self.tensors())
        with random_numbers_kept():
            for name, part in self._objects.items():
                try_object(name, part)
            wrappers = [wrapper.module for wrapper in self.wrappers]
            refuse_forgotten_parts(self._trained, self.optimizers, self._objects, wrappers)

    def unsaved_buffers(self) -> list[str]:
        """The names of the modules' buffers that are no part of the state."""
        return self._parts.unsaved_buffers()

    def check_parts(self) -> None:
        """Raise FunctionError if the modules have other parameters or persistent buffers than when
        the registration ended: they would not be saved."""
        self._parts.check_unchanged()

    # --- the state ------------------------------------------------------------------------------

    @property
    def layout(self) -> StateLayout:
        """The layout of the state that was frozen last; an object that outgrows its room changes
        it."""
        return self._current_state().layout

    def make_room(self, layout: StateLayout) -> None:
        """Give the objects the room that they have in `layout`, so that its payload can be read."""
        if self._encoded.take_rooms(layout):
            self._rebuild()

    def freeze(self, small: dict[str, Any]) -> Snapshot:
        self._refresh()
        snapshot = self._current_state().freeze(small)
        if self._copies_at_once:
            snapshot.keep()
        self._versions = self._present_versions()
        return snapshot

    def digest(self, small: dict[str, Any]) -> str:
        self._refresh()
        return self._current_state().digest(small)

    def read(self, payload: memoryview) -> dict[str, Any]:
        """Load a payload, in place, and return its small state."""
        self._follow_buffers()
        self._versions = []
        small = self._current_state().read(payload)
        with torch.no_grad():
            for name, tensor in self._other.items():
                assign(local_of(tensor), self._copies[name])
        saved = self._encoded.encodings()
        if self._encoded.take_former_rooms():
            self._rebuild()
        for name, state in zip(self.optimizers, self._optimizer_states, strict=True):
            state.restore_plain(decode(saved[name]))
        for name, part in self._objects.items():
            part.load_state_dict(decode(saved[name]))
            if lost := lost_by(name, part, saved[name]):
                log_lost_state(f"{name}: {lost}")
        return small

    # --- the step -------------------------------------------------------------------------------

    def trained(self) -> list[tuple[str, Tensor, ShardBox]]:
        """The parameters that belong to an optimizer and have a gradient."""
        return [
            (name, tensor, shard_box_of(tensor, self._coordinates))
            for name, tensor in self._trained.items()
            if tensor.grad is not None
        ]

    def refuse_sparse_gradients(self) -> None:
        """Raise FunctionError if a gradient cannot take part in a step."""
        refuse_sparse_gradients(self._trained.items())

    def set_last_micro_batch(self, last: bool) -> None:
        """Call before each micro-batch: only a step's last one reduces gradients."""
        for module in self.modules.values():
            set_last_micro_batch(module, last)
        for wrapper in self.wrappers:
            wrapper.prepare(last)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self._trained)

    def check_step(self) -> None:
        """Call before a step is committed. Raises FunctionError if it cannot be."""
        if self._stepped_parameters() != self._stepped:
            raise FunctionError(
                "the parameters of an optimizer have changed since the first step (as by "
                "add_param_group): their gradients would not be averaged and their state not be "
                "saved. Give the optimizer all parameters before the first step; a group that is "
                "to start later can have a learning rate of 0 until then"
            )
        if any(has_unreduced_gradients(module) for module in self.modules.values()):
            raise FunctionError(
                "a step has no backward pass of its last micro-batch, in which FSDP adds up the "
                "gradients of all: run that of every micro-batch, with a loss times zero where "
                "one is to have no weight"
            )
        self._check_versions()

    def step(self) -> None:
        """Step every optimizer and clear the gradients."""
        self._versions = []
        with self.stepping():
            for optimizer in self.optimizers.values():
                optimizer.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None
        for wrapper in self.wrappers:
            wrapper.forget()

    def stepping(self) -> _Stepping:
        return _Stepping(self)

    def allow_steps(self, allowed: bool) -> None:
        self._stepping = allowed

    def _refuse_outside_steps(self, *_: object) -> None:
        if not self._stepping:
            raise FunctionError(
                "step() of a registered optimizer was called: leave that to the context's step(), "
                "which steps it once all ranks have agreed"
            )

    # --- internal -------------------------------------------------------------------------------

    def _current_state(self) -> RankState:
        if self._state is None:
            raise FunctionError("nothing has been registered")
        if self._built_on != self._addresses():  # an optimizer created or replaced its state
            self._rebuild()
        return self._state

    def _rebuild(self) -> None:
        before = self._state.layout if self._state is not None else None
        self._state = RankState(list(self._pieces()))
        self._built_on = self._addresses()
        now = self._state.layout
        if before not in (None, now) and not differ_in_room(before, now):
            raise FunctionError(
                "the shape of the state has changed since the first step: register everything "
                "before, with its final sizes"
            )

    def _addresses(self) -> list[int]:
        """The addresses of the tensors that may be replaced by others."""
        trained = [_undetached(tensor).data_ptr() for tensor in self._trained.values()]
        states = [
            _undetached(tensor).data_ptr()
            for state in self._optimizer_states
            for _, tensor, _ in state.tensors()
        ]
        return trained + states

    def _pieces(self) -> Iterator[StateTensor]:
        for name, tensor in self._trained.items():
            box = shard_box_of(tensor, self._coordinates)
            yield StateTensor(name, local_of(tensor), box, weight=True)
        for name, copy in self._copies.items():
            tensor = self._other[name]
            box = shard_box_of(tensor, self._coordinates)
            is_buffer = not isinstance(tensor, nn.Parameter | DTensor)
            yield StateTensor(name, copy, box, weight=True, local=is_buffer)
        for state in self._optimizer_states:
            for name, tensor, parameter in state.tensors():
                box = self._box_beside(tensor, parameter)
                yield StateTensor(name, local_of(tensor), box, weight=False)
        yield from self._own
        primary = not any(self._coordinates.values())
        for name, buffer in self._encoded:
            shape, is_object = (buffer.numel(),), name in self._objects
            box = ShardBox(shape, (0,), shape, primary)
            yield StateTensor(OBJECT_PREFIX + name, buffer, box, weight=False, local=is_object)

    def _box_beside(self, tensor: Tensor, parameter: Tensor) -> ShardBox:
        """The box of an optimizer's tensor; it is sharded like its parameter."""
        box = shard_box_of(tensor, self._coordinates)
        if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim():
            raise FunctionError("an optimizer stores unsharded tensors for a sharded parameter")
        return box

    def _check_versions(self) -> None:
        """Parameters that change within a step must be copied before it: its first step shows
        whether a function changes them."""
        if not self._versions:  # nothing has been frozen since they were stepped
            return
        changed = self._versions != self._present_versions()
        if changed and not self._copies_at_once:
            raise FunctionError(
                "a function has changed trained parameters within a step, and had not done so in "
                "its first step: change them in ctx.step() alone, or in the first step too, so "
                "that they are copied before"
            )
        self._copies_at_once = changed

    def _present_versions(self) -> list[int]:
        """Counts of the changes in place of each trained parameter."""
        return [_undetached(tensor)._version for tensor in self._trained.values()]

    def _stepped_parameters(self) -> list[int]:
        """The ids of all parameters of the optimizers, in their order."""
        return [id(p) for optimizer in self.optimizers.values() for p in _parameters(optimizer)]

    def _encoded_objects(self) -> Iterator[tuple[str, bytes]]:
        for name, state in zip(self.optimizers, self._optimizer_states, strict=True):
            yield name, encode(state.plain(), name)
        for name, part in self._objects.items():
            yield name, encode(part.state_dict(), name)

    def _follow_buffers(self) -> None:
        """Find the buffers that the modules have now."""
        for name, place in self._places.items():
            self._other[name] = place.current(name, self._other[name])

    def _refresh(self) -> None:
        """Copy the parts that may change at any time."""
        self._follow_buffers()
        with torch.no_grad():
            for name, tensor in self._other.items():
                self._copies[name].copy_(local_of(tensor))
        grown = [self._encoded.write(name, raw) for name, raw in self._encoded_objects()]
        if any(grown) and self._state is not None:
            self._rebuild()


class _Stepping:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __enter__(self) -> None:
        self._registry.allow_steps(True)

    def __exit__(self, *_: object) -> None:
        self._registry.allow_steps(False)


def _undetached(tensor: Tensor) -> Tensor:
    """The local tensor like `local_of`, without the cost of detaching each tensor in each step."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(names: Mapping[int, str], parameter: Tensor, optimizer: str) -> str:
    if id(parameter) not in names:
        raise FunctionError(
            f"{optimizer} has a parameter of no registered module: register that module too"
        )
    return names[id(parameter)]
