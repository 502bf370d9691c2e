"""What a function has registered, as the state of its rank: one layout, whatever it is made of.

Parameters that an optimizer holds change only when the context takes a step, so they are copied in
the shadow of the next one. All else (buffers, averages, schedulers) a function may change whenever
it likes: that is copied at once, when a step is kept.
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

from holdfast_workers.functions.encoding import decode, encode
from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.functions.optimizer_state import OptimizerState
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.rank_state import Box, Piece, RankState, Snapshot, box_of, local_of

LEAST_CAPACITY = 4096
GROWTH = 2
"""So much larger than when it was registered an object's state may become."""
_LENGTH_BYTES = 8


class Registry:
    """`coordinates`: this rank's on every axis of the mesh."""

    def __init__(self, coordinates: Mapping[str, int]) -> None:
        self._here = coordinates
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.synchronizes_itself = False
        """Whether a wrapper of torch averages the gradients of what is whole."""
        self._objects: dict[str, Any] = {}
        self._own: list[Piece] = []
        self._trained: dict[str, Tensor] = {}
        self._other: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._kept: list[OptimizerState] = []
        self._encoded: dict[str, Tensor] = {}
        self._state: RankState | None = None
        self._at: list[int] = []
        self._stepping = False

    # --- what is registered ---------------------------------------------------------------------

    def add(self, name: str, thing: Any) -> None:
        """Raises FunctionError for what has no state that could be kept."""
        if not name.isidentifier():
            raise FunctionError(f"{name!r} is no name for a part of the state: use an identifier")
        if name in (*self.modules, *self.optimizers, *self._objects, "guards", "data", "holdfast"):
            raise FunctionError(f"there is a {name!r} in the state already: choose another name")
        if isinstance(thing, DistributedDataParallel):
            thing, self.synchronizes_itself = thing.module, True
        if isinstance(thing, nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, Optimizer):
            self.optimizers[name] = thing
            thing.register_step_pre_hook(self._refuse_strangers)
        elif callable(getattr(thing, "state_dict", None)) and hasattr(thing, "load_state_dict"):
            self._objects[name] = thing
        else:
            raise FunctionError(
                f"{name} ({type(thing).__qualname__}) has no state_dict and load_state_dict: "
                "register modules, optimizers, and what has both"
            )

    def settle(self, own: Sequence[Piece]) -> None:
        """Nothing more will be registered; the layout is fixed. `own`: pieces of the house."""
        self._own = list(own)
        owned = {id(p) for one in self.optimizers.values() for p in _parameters(one)}
        for prefix, module in self.modules.items():
            for name, tensor in _tensors(module):
                group = self._trained if id(tensor) in owned else self._other
                group[f"{prefix}.{name}"] = tensor
        names = {id(tensor): name for name, tensor in self._trained.items()}
        with self.stepping():
            self._kept = [
                OptimizerState(name, one, [(_named(names, p, name), p) for p in _parameters(one)])
                for name, one in self.optimizers.items()
            ]
        for name, tensor in self._other.items():
            self._copies[name] = local_of(tensor).clone()
        for name, raw in self._objects_now():
            self._encoded[name] = torch.zeros(_capacity(raw), dtype=torch.uint8)
        self._refresh()
        self._rebuild()

    def alike_everywhere(self) -> None:
        """Give all ranks the first one's values of what is not cut. Collective."""
        with torch.no_grad():
            for tensor in (*self._trained.values(), *self._other.values()):
                if not isinstance(tensor, DTensor):
                    dist.broadcast(tensor.detach(), src=0)

    # --- the state ------------------------------------------------------------------------------

    @property
    def layout(self) -> StateLayout:
        return self._whole().layout

    def freeze(self, small: dict[str, Any]) -> Snapshot:
        self._refresh()
        return self._whole().freeze(small)

    def digest(self, small: dict[str, Any]) -> str:
        self._refresh()
        return self._whole().digest(small)

    def read(self, payload: memoryview) -> dict[str, Any]:
        """Take over a payload, in place; the small state in it."""
        self._refresh()
        small = self._whole().read(payload)
        with torch.no_grad():
            for name, tensor in self._other.items():
                local_of(tensor).copy_(self._copies[name])
        kept = {name: decode(_unpacked(buffer)) for name, buffer in self._encoded.items()}
        for name, state in zip(self.optimizers, self._kept, strict=True):
            state.put(kept[name])
        for name, thing in self._objects.items():
            thing.load_state_dict(kept[name])
        return small

    # --- the step -------------------------------------------------------------------------------

    def trained(self) -> list[tuple[str, Tensor, Box]]:
        """Parameters that an optimizer holds and that have a gradient."""
        return [
            (name, tensor, box_of(tensor, self._here))
            for name, tensor in self._trained.items()
            if tensor.grad is not None
        ]

    def parameters(self) -> dict[str, Tensor]:
        return dict(self._trained)

    def step(self) -> None:
        """Every optimizer takes one, and gradients are dropped."""
        with self.stepping():
            for one in self.optimizers.values():
                one.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    def stepping(self) -> _Stepping:
        return _Stepping(self)

    def allow_steps(self, allowed: bool) -> None:
        self._stepping = allowed

    def _refuse_strangers(self, *_: object) -> None:
        if not self._stepping:
            raise FunctionError(
                "an optimizer of this job was told to step: leave that to the context's step(), "
                "which does so once all ranks have agreed"
            )

    # --- parts ----------------------------------------------------------------------------------

    def _whole(self) -> RankState:
        if self._state is None:
            raise FunctionError("nothing has been registered")
        if self._at != self._addresses():  # an optimizer has made its state, or made it anew
            self._rebuild()
        return self._state

    def _rebuild(self) -> None:
        before = self._state.layout if self._state is not None else None
        self._state = RankState(list(self._pieces()))
        self._at = self._addresses()
        if before is not None and before != self._state.layout:
            raise FunctionError(
                "the state is of another shape than when the first step was asked for: register "
                "all of it before, with the sizes it keeps"
            )

    def _addresses(self) -> list[int]:
        """Where the tensors are that may be replaced by others."""
        trained = [local_of(one).data_ptr() for one in self._trained.values()]
        kept = [local_of(t).data_ptr() for one in self._kept for _, t, _ in one.tensors()]
        return trained + kept

    def _pieces(self) -> Iterator[Piece]:
        for name, tensor in self._trained.items():
            yield Piece(name, local_of(tensor), box_of(tensor, self._here))
        for name, copy in self._copies.items():
            yield Piece(name, copy, box_of(self._other[name], self._here))
        for one in self._kept:
            for name, tensor, parameter in one.tensors():
                yield Piece(name, local_of(tensor), self._box_beside(tensor, parameter))
        yield from self._own
        primary = not any(self._here.values())
        for name, buffer in self._encoded.items():
            shape = (buffer.numel(),)
            yield Piece(f"object.{name}", buffer, Box(shape, (0,), shape, primary))

    def _box_beside(self, tensor: Tensor, parameter: Tensor) -> Box:
        """A local tensor beside one that is cut is cut as that one is."""
        box = box_of(tensor, self._here)
        if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim():
            raise FunctionError("an optimizer keeps whole tensors of a parameter that is cut")
        return box

    def _objects_now(self) -> Iterator[tuple[str, bytes]]:
        for name, one in zip(self.optimizers, self._kept, strict=True):
            yield name, encode(one.plain(), name)
        for name, thing in self._objects.items():
            yield name, encode(thing.state_dict(), name)

    def _refresh(self) -> None:
        """Copy what may change at any time."""
        with torch.no_grad():
            for name, tensor in self._other.items():
                self._copies[name].copy_(local_of(tensor))
        for name, raw in self._objects_now():
            _pack(name, raw, self._encoded[name])


class _Stepping:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __enter__(self) -> None:
        self._registry.allow_steps(True)

    def __exit__(self, *_: object) -> None:
        self._registry.allow_steps(False)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and what its state_dict has beside them, each once."""
    yield from module.named_parameters()
    kept = module.state_dict(keep_vars=True)
    for name, tensor in module.named_buffers():
        if name in kept:
            yield name, tensor


def _named(names: Mapping[int, str], parameter: Tensor, optimizer: str) -> str:
    if id(parameter) not in names:
        raise FunctionError(
            f"{optimizer} holds a parameter of no registered module: register that module too"
        )
    return names[id(parameter)]


def _capacity(raw: bytes) -> int:
    return -(-(GROWTH * len(raw) + _LENGTH_BYTES) // LEAST_CAPACITY) * LEAST_CAPACITY


def _pack(name: str, raw: bytes, buffer: Tensor) -> None:
    room = buffer.numel() - _LENGTH_BYTES
    if len(raw) > room:
        raise FunctionError(
            f"the state of {name} has grown to {len(raw)} bytes; there is room for {room}: keep "
            "what grows in tensors of a module, or register it when it has its full size"
        )
    whole = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
    buffer.zero_()
    buffer[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _unpacked(buffer: Tensor) -> bytes:
    raw = buffer.numpy().tobytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]
