"""Encodes a `state_dict` as JSON bytes and decodes it, with markers for types that JSON lacks.

Nothing is unpickled. Supported are numbers, strings, None, lists, tuples, dictionaries with keys
of these types, bytes, tensors and NumPy arrays. Floats keep their exact bits.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast_workers.functions.function_errors import FunctionError

_MARK = "~"


def encode(value: object, where: str) -> bytes:
    """`where` names the value in an error. Raises FunctionError for an unsupported type."""
    return json.dumps(_plain(value, where), separators=(",", ":")).encode()


def decode(raw: bytes) -> Any:
    return _value(json.loads(raw))


def _plain(original: Any, where: str) -> Any:
    value = original.item() if isinstance(original, np.generic) else original
    if isinstance(value, torch.Tensor | np.ndarray):
        return _plain_array(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else _marked("tuple", items)
    if isinstance(value, dict):
        return _plain_dictionary(value, where)
    if isinstance(value, bytes):
        return _marked("bytes", b64encode(value).decode())
    raise FunctionError(
        f"{where} is a {type(value).__qualname__}, which cannot be saved: a state_dict may contain "
        "numbers, strings, None, bytes, lists, tuples, dictionaries, tensors and NumPy arrays"
    )


def _plain_array(value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _marked("tensor", _bytes(value))
    return _marked("array", _bytes(torch.from_numpy(np.ascontiguousarray(value))))


def _plain_dictionary(value: dict[Any, Any], where: str) -> Any:
    pairs = [(key, _plain(item, f"{where}.{key}")) for key, item in value.items()]
    if all(type(key) is str and not key.startswith(_MARK) for key, _ in pairs):
        return dict(pairs)
    return _marked("dict", [[_plain(key, where), item] for key, item in pairs])


def _marked(kind: str, content: Any) -> dict[str, Any]:
    return {f"{_MARK}{kind}": content}


def _bytes(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), b64encode(flat.numpy().tobytes()).decode()]


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8) if text else None
    kind = getattr(torch, dtype)
    return torch.empty(shape, dtype=kind) if raw is None else raw.view(kind).reshape(shape)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = next(iter(plain)) if len(plain) == 1 else ""
    unmarked = _UNMARKED.get(kind)
    if unmarked is not None:
        return unmarked(plain[kind])
    return {key: _value(item) for key, item in plain.items()}


_UNMARKED: dict[str, Callable[[Any], Any]] = {
    "~tuple": lambda items: tuple(_value(item) for item in items),
    "~dict": lambda pairs: {_value(key): _value(item) for key, item in pairs},
    "~bytes": b64decode,
    "~tensor": lambda parts: _tensor(*parts),
    "~array": lambda parts: _tensor(*parts).numpy(),
}
