"""The live state of one rank as a list of local tensors, written to and read from a payload.

Every tensor has a name and a box of a global tensor, so that the payload's bytes have the same
meaning on any mesh. Reading copies in place: tensors keep their identity and their memory format,
so references to them stay valid. The small state (the step, the data position) is JSON in one entry
of fixed size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast_workers.state.device_staging import DeviceStaging
from holdfast_workers.state.digest import ShardDigest, ShardHasher, streamed_digest
from holdfast_workers.state.joined_axes import axes_of
from holdfast_workers.state.layout import (
    MODEL_PREFIX,
    SMALL_STATE,
    StateLayout,
    TensorEntry,
    aligned,
)
from holdfast_workers.state.strided_bytes import assign_bytes, host_bytes, is_flat

SMALL_CAPACITY = 1024
_CHUNK = 1 << 20  # bytes: fits into a core's own cache
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ShardBox:
    """The part `offsets + [0, shape)` of a global tensor that this rank holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    primary: bool
    """False if a lower rank of the world holds the same box."""

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class StateTensor:
    """One local tensor of the state. Its content is read and written in place."""

    name: str
    tensor: Tensor
    box: ShardBox
    weight: bool | None = None
    """Whether it is a weight of the model, which `init_from` loads alone with `what: model`, and an
    export contains. None: if its name begins with `model.`."""
    local: bool = False
    """Whether other ranks with the same box have other values in it; see `TensorEntry`."""


@dataclass(frozen=True)
class RankBytes:
    """State of this rank alone that has no tensor of its own, e.g. of a random generator."""

    name: str
    get: Callable[[], Tensor]
    """A uint8 tensor on the CPU, of a fixed size."""
    put: Callable[[Tensor], None]


class CopyStopped(Exception):
    """The copy was cancelled before it was complete."""


class StateMismatch(Exception):
    """A payload does not fit the live state: it is of another run or mesh, or damaged."""


def shard_box_of(parameter: Tensor, replicated_on: Mapping[str, int]) -> ShardBox:
    """The box of a parameter's local tensor, plain or DTensor.

    `replicated_on`: this rank's coordinate on every axis of the whole mesh. On an axis that the
    parameter's placements do not name, the parameter counts as whole and equal on all ranks. A
    joined dimension stands for all of its axes.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ShardBox(shape, (0,) * len(shape), shape, not any(replicated_on.values()))
    mesh, placements = parameter.device_mesh, parameter.placements
    local, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    sharded = sharded_dimensions(parameter)
    first = all(index == 0 for axis, index in replicated_on.items() if axis not in sharded)
    return ShardBox(shape, tuple(offsets), tuple(local), first)


def sharded_dimensions(parameter: Tensor) -> dict[str, int]:
    """The mesh axes that divide a parameter, plain or DTensor, each with the dimension that it
    divides. A joined dimension stands for all of its axes."""
    if not isinstance(parameter, DTensor):
        return {}
    names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    return {
        axis: placement.dim
        for name, placement in zip(names, parameter.placements, strict=True)
        if isinstance(placement, Shard | _StridedShard)
        for axis in axes_of(name)
    }


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: shares its memory and is detached from autograd."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Snapshot:
    """The state of one rank at one step, ready to be copied.

    The copy needs no torch, so another thread may make it as long as the tensors are only read.
    """

    def __init__(
        self,
        layout: StateLayout,
        sources: Sequence[_Bytes],
        await_sources: Callable[[], None] = lambda: None,
    ) -> None:
        """`await_sources` returns once the bytes of `sources` have arrived on the host."""
        self.layout = layout
        self.sources = sources
        self.await_sources = await_sources

    def keep(self) -> None:
        """Copy the state now, so that it may change before `copy_to` has read it."""
        self.await_sources()
        self.sources = [source.copy() for source in self.sources]

    def write(self, payload: memoryview, stopped: Callable[[], bool] = lambda: False) -> str:
        """`copy_to`, of which it returns the digest of the whole payload."""
        return self.copy_to(payload, stopped).whole

    def copy_to(
        self, payload: memoryview, stopped: Callable[[], bool] = lambda: False
    ) -> ShardDigest:
        """Fill `payload` with the tensors by the layout and zeros between them; return its digest.

        One pass: every chunk is hashed and then copied while it is still in the processor's
        cache. So the digest is of the live state, and a faulty copy does not match it. Hashing and
        copying release the interpreter's lock. Raises CopyStopped soon after `stopped` holds.
        """
        target = np.frombuffer(payload, dtype=np.uint8)
        if target.nbytes != self.layout.payload_bytes:
            raise StateMismatch(
                f"payload has {target.nbytes} bytes, the state {self.layout.payload_bytes}"
            )
        self.await_sources()
        hasher = ShardHasher(self.layout.shared_bytes)
        for entry, source in zip(self.layout.tensors, self.sources, strict=True):
            if source.nbytes != entry.nbytes:
                raise StateMismatch(f"{entry.name} has {source.nbytes} bytes, not {entry.nbytes}")
            end = entry.offset + entry.nbytes
            padded = entry.offset + aligned(entry.nbytes)
            for start in range(0, entry.nbytes, _CHUNK):
                if stopped():
                    raise CopyStopped
                chunk = source[start : start + _CHUNK]
                hasher.update(chunk.data)
                target[entry.offset + start : entry.offset + start + chunk.nbytes] = chunk
            if padded > end:
                target[end:padded] = 0
                hasher.update(target[end:padded].data)
        return hasher.digest()

    def digest(self) -> str:
        """The digest that `write` would return, without a payload to write to."""
        return self.shard_digest().whole

    def shard_digest(self) -> ShardDigest:
        """The digest that `copy_to` would return, without a payload to write to."""
        self.await_sources()
        sources = (source.data for source in self.sources)
        return streamed_digest(sources, self.layout.shared_bytes)

    def rank_bytes(self) -> dict[str, bytes]:
        """The per-rank entries' bytes, by name."""
        pairs = zip(self.layout.tensors, self.sources, strict=True)
        return {entry.name: source.tobytes() for entry, source in pairs if entry.per_rank}


class RankState:
    """All state of one rank, in a fixed order and at fixed offsets of a payload."""

    def __init__(self, pieces: Sequence[StateTensor], rank_bytes: Sequence[RankBytes] = ()) -> None:
        # In which replicas may differ comes last, so that one pass digests the rest apart.
        self._pieces = sorted(pieces, key=lambda piece: piece.local)
        self._rank_bytes = list(rank_bytes)
        self._staging: DeviceStaging | None = None
        self.layout = self._lay_out()

    def freeze(self, small: dict[str, Any]) -> Snapshot:
        """The current state, to be copied later; the copy is valid until a tensor changes.

        Per-rank bytes and the small state change sooner, so they are copied at once. Tensors on an
        accelerator start their copy to the host; training does not wait for it. Tensors of another
        memory format than the payload's are copied at once, too.
        """
        on_device = [piece.tensor for piece in self._pieces if _is_staged(piece.tensor)]
        if not on_device:
            return Snapshot(self.layout, list(self._contents(small)))
        if self._staging is None:
            self._staging = DeviceStaging(on_device)
        await_copy = self._staging.start_copy()
        staged = iter(self._staging.arrays)
        sources = [
            next(staged) if _is_staged(piece.tensor) else host_bytes(piece.tensor)
            for piece in self._pieces
        ]
        return Snapshot(self.layout, [*sources, *self._own_contents(small)], await_copy)

    def read(self, payload: memoryview) -> dict[str, Any]:
        """Copy `payload` into the live tensors, in place; return the small state."""
        source = np.frombuffer(payload, dtype=np.uint8)
        if source.nbytes != self.layout.payload_bytes:
            raise StateMismatch(
                f"payload has {source.nbytes} bytes, the state {self.layout.payload_bytes}"
            )
        parts = [source[e.offset : e.offset + e.nbytes] for e in self.layout.tensors]
        # Small state first: if it cannot be read, nothing has been overwritten yet.
        small = _decode_small(parts[-1])
        tensors = len(self._pieces)
        for piece, part in zip(self._pieces, parts[:tensors], strict=True):
            _copy_in(piece.tensor, part)
        for own, part in zip(self._rank_bytes, parts[tensors:-1], strict=True):
            own.put(torch.from_numpy(part.copy()))
        return small

    def digest(self, small: dict[str, Any]) -> str:
        """Digest of the payload that a snapshot of the current state would fill."""
        contents = (source.data for source in self._contents(small))
        return streamed_digest(contents, self.layout.shared_bytes).whole

    def _contents(self, small: dict[str, Any]) -> Iterator[_Bytes]:
        for piece in self._pieces:
            yield host_bytes(piece.tensor)
        yield from self._own_contents(small)

    def _own_contents(self, small: dict[str, Any]) -> Iterator[_Bytes]:
        for own in self._rank_bytes:
            yield own.get().numpy()
        yield _encode_small(small)

    def _lay_out(self) -> StateLayout:
        entries = [_tensor_entry(piece) for piece in self._pieces]
        entries += [_bytes_entry(own.name, own.get().numel()) for own in self._rank_bytes]
        entries.append(_bytes_entry(SMALL_STATE, SMALL_CAPACITY))
        placed, offset = [], 0
        for entry in entries:
            placed.append(replace(entry, offset=offset))
            offset += aligned(entry.nbytes)
        return StateLayout(tensors=tuple(placed), payload_bytes=offset)


def _tensor_entry(piece: StateTensor) -> TensorEntry:
    tensor, box = piece.tensor, piece.box
    if tuple(tensor.shape) != box.shape:
        raise StateMismatch(f"{piece.name}: {tuple(tensor.shape)} does not match its box {box}")
    return TensorEntry(
        name=piece.name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        global_shape=box.global_shape,
        offsets=box.offsets,
        shape=box.shape,
        offset=0,
        nbytes=tensor.numel() * tensor.element_size(),
        primary=box.primary and tensor.numel() > 0,
        weight=piece.name.startswith(MODEL_PREFIX) if piece.weight is None else piece.weight,
        local=piece.local,
    )


def _bytes_entry(name: str, nbytes: int) -> TensorEntry:
    shape = (nbytes,)
    return TensorEntry(
        name=name,
        dtype="uint8",
        global_shape=shape,
        offsets=(0,),
        shape=shape,
        offset=0,
        nbytes=nbytes,
        per_rank=True,
        weight=False,
    )


def _is_staged(tensor: Tensor) -> bool:
    return tensor.is_cuda and is_flat(tensor)


def _copy_in(tensor: Tensor, part: _Bytes) -> None:
    if tensor.is_cpu and is_flat(tensor):
        np.copyto(host_bytes(tensor), part)
    else:
        assign_bytes(tensor, torch.from_numpy(part.copy()))


def _encode_small(small: dict[str, Any]) -> _Bytes:
    text = json.dumps(small, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > SMALL_CAPACITY:
        raise StateMismatch(
            f"small state takes {len(text)} bytes; there is room for {SMALL_CAPACITY}"
        )
    return np.frombuffer(text.ljust(SMALL_CAPACITY, b"\0"), dtype=np.uint8)


def _decode_small(part: _Bytes) -> dict[str, Any]:
    try:
        small = json.loads(part.tobytes().rstrip(b"\0"))
    except ValueError as error:
        raise StateMismatch("the payload's small state is not JSON") from error
    if not isinstance(small, dict):
        raise StateMismatch("the payload's small state is not an object")
    return small
