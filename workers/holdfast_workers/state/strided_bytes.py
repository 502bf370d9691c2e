"""The bytes of a tensor in the order of its indices, whatever its strides.

A payload's bytes mean the same on every mesh, so they do not depend on a memory format. A tensor
whose memory already has that order is viewed and never copied; any other is copied when its bytes
are taken, and assigned element by element, so that it keeps its own strides.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy


def is_flat(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` holds its values in the order of its indices."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes as one dimension, on the tensor's device: a view if `is_flat`, else a copy."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.view(-1).view(torch.uint8)


def host_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes on the host: a view of the tensor if it is there and `is_flat`, else a copy."""
    flat: NDArray[np.uint8] = flat_bytes(tensor).cpu().numpy()
    return flat


def assign_bytes(tensor: Tensor, content: Tensor) -> None:
    """Give `tensor` the values whose bytes are `content`, in place."""
    with torch.no_grad():
        if is_flat(tensor):
            flat_bytes(tensor).copy_(content)
        else:
            assign(tensor, content.view(tensor.dtype).view(tensor.shape))


def assign(tensor: Tensor, values: Tensor) -> None:
    """`tensor.copy_(values)`, also for a tensor that was expanded: its repeated elements are one
    place in memory, which torch refuses to write to more than once."""
    target = tensor.detach()
    for dimension in _repeated(target):
        target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    target.copy_(values)


def obstacle(tensor: Tensor) -> str:
    """Why the values of `tensor` cannot be saved as bytes, and what to do; empty if they can."""
    if is_lazy(tensor):
        return "has no shape yet: run the model once before"
    if tensor.is_meta:
        return "is on the meta device, so it has no values: create it on a real one before"
    if tensor.layout != torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        return f"is sparse ({name}): save its indices and its values, or its to_dense()"
    if tensor.is_quantized:
        return "is quantized: save its int_repr(), scale and zero point"
    if _overlaps(tensor):
        return "has elements that share memory with each other: save its clone()"
    return ""


def _repeated(tensor: Tensor) -> list[int]:
    """The dimensions along which all elements are the same place in memory."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [index for index, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory in another way than by repetition. Also True for some views
    made by `as_strided` in which none do."""
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride <= reached:
                return tensor.numel() > 0
            reached += stride * (size - 1)
    return False
