"""Tries, before the first step, whether what a function registered comes back as it was saved.

An object's state is saved and loaded into the same object, as a recovery would load it, and saved
again. A difference, or a part of the state that `load_state_dict` does not even read, is refused by
the object's name: it would be noticed only after a fault, or never. Afterwards the object is given
the values that it had, so references of the function to them stay valid. Of what else a
`load_state_dict` does (to files, to other objects), nothing is undone but random numbers drawn.

Tensors are copied byte for byte, so of those that a payload views only one per type is tried, and
of the others every one. So the trial needs memory for the largest of these tensors, not for the
state.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast_workers.functions.encoding import decode, encode
from holdfast_workers.functions.function_errors import FunctionError
from holdfast_workers.state.rank_state import local_of
from holdfast_workers.state.strided_bytes import assign_bytes, host_bytes, is_flat, obstacle

_SHOWN_CHARS = 60


def refuse_unsaveable(tensors: Mapping[str, Tensor]) -> None:
    """Raises FunctionError with the name of the first tensor that has no bytes of its own."""
    for name, tensor in tensors.items():
        if why := obstacle(local_of(tensor)):
            raise FunctionError(f"{name} {why}")


def try_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Write and read back tensors in place, see the module. Raises FunctionError."""
    tried: set[object] = set()
    for name, tensor in tensors.items():
        local = local_of(tensor)
        kind = (type(local), local.dtype, local.device)
        if is_flat(local) and kind in tried:
            continue
        tried.add(kind)
        saved = host_bytes(local).copy()
        assign_bytes(local, torch.from_numpy(saved).to(local.device))
        if not np.array_equal(host_bytes(local), saved):
            raise FunctionError(
                f"{name} does not come back as it was saved: register a clone() of it"
            )


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's generators continue afterwards as if nothing had been drawn."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def try_object(name: str, part: Any) -> None:
    """Save and load one object, see the module. Raises FunctionError."""
    original = part.state_dict()
    saved = encode(original, name)
    if change := _difference(saved, encode(part.state_dict(), name), name):
        raise FunctionError(
            f"{name} cannot be restored: its state_dict() returns another value in each call "
            f"({change}), so no saved state is equal to the next one"
        )
    loaded = decode(saved)
    watched = _Watched(loaded) if type(loaded) is dict else loaded
    try:
        part.load_state_dict(watched)
    except Exception:  # also if it insists on a dict; that of a dict is the user's
        watched = decode(saved)
        _load(name, part, watched)
    if change := lost_by(name, part, saved):
        raise FunctionError(f"{name} cannot be restored: {change}")
    if isinstance(watched, _Watched) and watched.unread and not _holds(part, watched):
        raise FunctionError(
            f"{name} cannot be restored: its state_dict() returns {_listed(watched.unread)}, which "
            "its load_state_dict() does not read. Restore it there, or leave it out of state_dict()"
        )
    _load(name, part, copy.copy(original))


def _holds(part: Any, state: object) -> bool:
    """Whether the object keeps the loaded dictionary itself."""
    own = getattr(part, "__dict__", {})
    return own is state or any(value is state for value in own.values())


def lost_by(name: str, part: Any, saved: bytes) -> str:
    """A description of what `part` has not taken from the state `saved` that was loaded into it;
    empty if it took all."""
    change = _difference(saved, encode(part.state_dict(), name), name)
    return change and (
        f"after load_state_dict(), its state_dict() is not what was saved ({change}): "
        "load_state_dict() must restore all that state_dict() returns"
    )


class _Watched(dict[Any, Any]):
    """A state_dict that notes which of its keys are read; whatever reads all of it, reads each."""

    encoded_as = dict
    """An object may keep it, and return it as its state."""

    def __init__(self, content: dict[Any, Any]) -> None:
        super().__init__(content)
        self.unread = set(content)

    def __iter__(self) -> Any:
        # Overridden so that `update(state)` and `**state` read the values through `__getitem__`.
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.unread.discard(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().setdefault(key, default)

    def popitem(self) -> Any:
        key, value = super().popitem()
        self.unread.discard(key)
        return key, value

    def items(self) -> Any:
        return self._all().items()

    def values(self) -> Any:
        return self._all().values()

    def copy(self) -> dict[Any, Any]:
        return self._all()

    def __or__(self, other: Any) -> Any:
        return self._all() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._all()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._all(),)

    def _all(self) -> dict[Any, Any]:
        self.unread.clear()
        return dict(self)


def _load(name: str, part: Any, state: Any) -> None:
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise FunctionError(
            f"{name} cannot be restored: its load_state_dict() refuses what its state_dict() has "
            f"returned ({type(error).__name__}: {error})"
        ) from error


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(repr(key) for key in keys))


def _difference(saved: bytes, found: bytes, name: str) -> str:
    """The place at which two encoded values differ first; empty if they do not."""
    if saved == found:
        return ""
    return _first_difference(json.loads(saved), json.loads(found), name)


def _first_difference(saved: Any, found: Any, where: str) -> str:
    if isinstance(saved, dict) and isinstance(found, dict) and list(saved) == list(found):
        parts = [(f"{where}.{key}", saved[key], found[key]) for key in saved]
    elif isinstance(saved, list) and isinstance(found, list) and len(saved) == len(found):
        parts = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(saved, found, strict=True))]
    else:
        return f"{where}: {_shown(saved)}, then {_shown(found)}"
    return next(
        _first_difference(before, after, path)
        for path, before, after in parts
        if json.dumps(before) != json.dumps(after)
    )


def _shown(plain: Any) -> str:
    text = json.dumps(plain)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
