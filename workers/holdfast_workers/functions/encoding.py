"""Encodes a `state_dict` as JSON bytes and decodes it, with marks for types that JSON lacks.

A value comes back with its own type, or is refused with its path; a subclass is never saved as its
base. Floats keep their exact bits, dictionaries their order. Equal values have equal bytes on all
ranks. Nothing is unpickled: what is decoded calls the constructors named here, and those of named
tuples whose module the function has imported.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast_workers.functions.encoded_arrays import (
    array_of,
    plain_array,
    plain_tensor,
    scalar_of,
    tensor_of,
)
from holdfast_workers.functions.function_errors import FunctionError

_MARK = "~"
_SUPPORTED = (
    "numbers, strings, None, bytes, lists, tuples, named tuples, dictionaries, sets, deques, "
    "tensors and NumPy arrays"
)
_FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
        *(Counter, OrderedDict, deque),
    )
}
"""Types that may be the `default_factory` of a defaultdict."""


def encode(value: object, where: str) -> bytes:
    """`where` names the value in an error. Raises FunctionError for an unsupported value."""
    try:
        return _text(_plain(value, where))
    except RecursionError:
        raise FunctionError(
            f"{where} contains itself, or is nested too deeply, so it cannot be saved"
        ) from None


def decode(raw: bytes) -> Any:
    return _value(json.loads(raw))


def _text(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _plain(value: Any, where: str) -> Any:
    kind = getattr(type(value), "encoded_as", type(value))
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, dict):
        return _items(value, where) if kind is list else _plain_dictionary(value, where)
    if kind in _MARKED:
        name, content = _MARKED[kind]
        return _marked(name, content(value, where))
    if isinstance(value, torch.Tensor):
        return _marked("tensor", plain_tensor(value, where))
    if isinstance(value, np.ndarray | np.generic):
        name = "ndarray" if isinstance(value, np.ndarray) else "scalar"
        return _marked(name, plain_array(value, where))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _marked("named", _plain_named(value, where))
    raise _unsupported(kind, where)


def _unsupported(kind: type, where: str) -> FunctionError:
    for base in (*_MARKED, dict, list, str, int, float):
        if issubclass(kind, base):
            return FunctionError(
                f"{where} is a {kind.__qualname__}, which would come back as a {base.__name__}: "
                f"put a {base.__name__} into the state_dict"
            )
    return FunctionError(
        f"{where} is a {kind.__qualname__}, which cannot be saved: a state_dict may contain "
        f"{_SUPPORTED}"
    )


def _marked(kind: str, content: Any) -> dict[str, Any]:
    return {f"{_MARK}{kind}": content}


def _items(values: Any, where: str) -> list[Any]:
    return [_plain(item, f"{where}[{index}]") for index, item in enumerate(values)]


def _sorted_items(values: Any, where: str) -> list[Any]:
    """The order of a set's elements differs between processes."""
    return sorted((_plain(item, f"{where}{{}}") for item in values), key=_text)


def _pairs(value: Mapping[Any, Any], where: str) -> list[list[Any]]:
    return [[_plain_key(key, where), _plain(item, f"{where}.{key}")] for key, item in value.items()]


def _plain_key(key: Any, where: str) -> Any:
    if isinstance(key, torch.Tensor):  # found by its identity, which does not come back
        raise FunctionError(f"{where} has a Tensor as a key, which cannot be saved: use a number")
    return _plain(key, where)


def _plain_dictionary(value: dict[Any, Any], where: str) -> Any:
    pairs = _pairs(value, where)
    if all(type(key) is str and not key.startswith(_MARK) for key, _ in pairs):
        return dict(pairs)
    return _marked("dict", pairs)


def _plain_ordered(value: OrderedDict[Any, Any], where: str) -> list[Any]:
    """The dictionary's items and attributes; a module's state has the versions of its parts in
    `_metadata`."""
    return [_pairs(value, where), _plain(dict(vars(value)), where)]


def _plain_default(value: defaultdict[Any, Any], where: str) -> list[Any]:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise FunctionError(
            f"{where} is a defaultdict whose default_factory is {factory!r}, which cannot be "
            "saved: use int, list or another type of Python's, or put a dict into the state_dict"
        )
    name = None if factory is None else getattr(factory, "__name__", "")
    return [name, _pairs(value, where)]


def _default(name: str | None, pairs: list[list[Any]]) -> defaultdict[Any, Any]:
    return defaultdict(None if name is None else _FACTORIES[name], _mapping(pairs))


def _plain_named(value: Any, where: str) -> list[Any]:
    kind = type(value)
    if _named_kind(kind.__module__, kind.__qualname__) is not kind:
        raise FunctionError(
            f"{where} is a {kind.__qualname__}, whose type is not found again under its name: "
            "define it at the top of a module, or put a tuple into the state_dict"
        )
    return [kind.__module__, kind.__qualname__, _items(value, where)]


def _named(module: str, name: str, items: list[Any]) -> Any:
    kind = _named_kind(module, name)
    if kind is None:
        raise FunctionError(
            f"the saved state has a {name} of the module {module}, which this process has not "
            "imported: import it where the function is defined"
        )
    return kind._make(_value(item) for item in items)


def _named_kind(module: str, name: str) -> Any:
    """The type of a named tuple, or None; imports nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    return found if is_named else None


def _mapping(pairs: list[list[Any]]) -> dict[Any, Any]:
    return {_value(key): _value(item) for key, item in pairs}


def _ordered(pairs: list[list[Any]], attributes: Any) -> OrderedDict[Any, Any]:
    result = OrderedDict(_mapping(pairs))
    vars(result).update(_value(attributes))
    return result


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


_MARKED: dict[type, tuple[str, Callable[[Any, str], Any]]] = {
    tuple: ("tuple", _items),
    set: ("set", _sorted_items),
    frozenset: ("frozenset", _sorted_items),
    bytes: ("bytes", lambda value, _: b64encode(value).decode()),
    bytearray: ("bytearray", lambda value, _: b64encode(value).decode()),
    complex: ("complex", lambda value, _: [value.real, value.imag]),
    deque: ("deque", lambda value, where: [_items(value, where), value.maxlen]),
    Counter: ("counter", _pairs),
    OrderedDict: ("ordered", _plain_ordered),
    defaultdict: ("default", _plain_default),
    torch.Size: ("size", lambda value, _: list(value)),
}
"""The mark of each type, and the function that encodes its content."""

_UNMARKED: dict[str, Callable[[Any], Any]] = {
    "~tuple": lambda items: tuple(_value(item) for item in items),
    "~set": lambda items: {_value(item) for item in items},
    "~frozenset": lambda items: frozenset(_value(item) for item in items),
    "~dict": _mapping,
    "~bytes": b64decode,
    "~bytearray": lambda text: bytearray(b64decode(text)),
    "~complex": lambda parts: complex(*parts),
    "~deque": lambda parts: deque((_value(item) for item in parts[0]), parts[1]),
    "~counter": lambda pairs: Counter(_mapping(pairs)),
    "~ordered": lambda parts: _ordered(*parts),
    "~default": lambda parts: _default(*parts),
    "~named": lambda parts: _named(*parts),
    "~size": torch.Size,
    "~tensor": lambda parts: tensor_of(*parts),
    "~ndarray": lambda parts: array_of(*parts),
    "~scalar": lambda parts: scalar_of(*parts),
}
