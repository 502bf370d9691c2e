"""Tensors and NumPy arrays as JSON: dtype, shape and the bytes in base64.

An array comes back with its own byte order and memory order, a tensor with its memory format, on
its kind of device, and as the parameter that it was. Other values are refused: sparse
tensors, subclasses, arrays of objects or records.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.state.strided_bytes import host_bytes, obstacle

_Array = np.ndarray[Any, Any]


def plain_tensor(tensor: Tensor, where: str) -> list[Any]:
    """`where` names the tensor in an error. Raises FunctionError."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise FunctionError(
            f"{where} is a {type(tensor).__qualname__}, which would come back as a tensor: "
            "register the module that it belongs to, or save what it consists of"
        )
    if why := obstacle(tensor):
        raise FunctionError(f"{where} {why}")
    traits: dict[str, Any] = {}
    if tensor.device.type != "cpu":
        traits["device"] = tensor.device.type
    if not tensor.is_contiguous():
        traits["strides"] = list(torch.empty_like(tensor).stride())
    if tensor.requires_grad:
        traits["requires_grad"] = True
    if isinstance(tensor, nn.Parameter):
        traits["parameter"] = True
    dtype = str(tensor.dtype).removeprefix("torch.")
    content = [dtype, list(tensor.shape), _text(host_bytes(tensor).tobytes())]
    return [*content, traits] if traits else content


def tensor_of(
    dtype: str, shape: list[int], text: str, traits: dict[str, Any] | None = None
) -> Tensor:
    traits = traits or {}
    raw = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8) if text else None
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if raw is None else raw.view(kind).reshape(shape)
    if "strides" in traits:
        tensor = torch.empty_strided(shape, traits["strides"], dtype=kind).copy_(tensor)
    tensor = tensor.to(traits.get("device", "cpu"))
    trained = bool(traits.get("requires_grad"))
    if "parameter" in traits:
        return nn.Parameter(tensor, requires_grad=trained)
    return tensor.requires_grad_(trained)


def plain_array(array: _Array | np.generic, where: str) -> list[Any]:
    """An array, or a scalar of NumPy. Raises FunctionError."""
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        raise FunctionError(
            f"{where} is a {type(array).__qualname__}, which would come back as an array: save "
            "what it consists of"
        )
    name = array.dtype.str
    if array.dtype.hasobject or np.dtype(name) != array.dtype:
        raise FunctionError(f"{where} is an array of {array.dtype}: save arrays of numbers or text")
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    order = "F" if fortran else "C"
    return [name, list(array.shape), _text(array.tobytes(order)), order]  # type: ignore[arg-type]


def array_of(name: str, shape: list[int], text: str, order: str) -> _Array:
    dtype = np.dtype(name)
    if not dtype.itemsize:  # only empty texts
        return np.zeros(shape, dtype)
    content = bytearray(b64decode(text))
    return np.ndarray(shape, dtype, content, order="F" if order == "F" else "C")


def scalar_of(name: str, shape: list[int], text: str, order: str) -> Any:
    return array_of(name, shape, text, order)[()]


def _text(raw: bytes) -> str:
    return b64encode(raw).decode()
