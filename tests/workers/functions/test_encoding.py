"""Values of a state_dict come back with their own types and bits, or are refused by their path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdfast_workers.functions import FunctionError
from holdfast_workers.functions.encoding import decode, encode


class Place(NamedTuple):
    epoch: int
    seen: list[int]


def ordered(**values: object) -> OrderedDict[str, object]:
    result = OrderedDict(values)
    result._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return result


def local_tuple() -> object:
    class Local(NamedTuple):
        a: int

    return Local(1)


def recursive() -> list[object]:
    value: list[object] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x"], "t": (1, (2, 3))},
        {1: "an int", (2, 3): {"~tuple": "no mark"}, None: b"\x00\xff", 0.5: {}, False: []},
        [math.inf, -math.inf, math.nan, -0.0, 0.1 + 0.2, 10**30],
        [complex(-0.0, math.inf), bytearray(b"\x01"), b""],
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {1: 2}),
        {"nested": defaultdict(Counter, {"a": Counter(x=2)})},
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, (2,)], maxlen=3),
        deque(),
        [{3, 1, 2}, frozenset(["a"]), {frozenset([(1, None)])}, set()],
        Place(3, [1, 2]),
        torch.Size([2, 3]),
        [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.str_("ab"), np.str_()],
        {np.int64(3): np.datetime64("2026-01-01T00:00:00")},
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type_and_order(value: object) -> None:
    back = decode(encode(value, "it"))
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_a_defaultdict_gives_new_keys_after_a_restore() -> None:
    back = decode(encode({"seen": defaultdict(int, {"a": 1})}, "it"))
    back["seen"]["new"] += 1
    assert back["seen"] == {"a": 1, "new": 1}


def test_the_versions_of_a_modules_state_dict_come_back() -> None:
    back = decode(encode(ordered(weight=1), "it"))
    assert back._metadata == {"": {"version": 2}}


def test_equal_sets_have_equal_bytes() -> None:
    """The order of a set of strings differs between processes."""
    first, second = set(), set()
    for number in range(100):
        first.add(f"{number}")
        second.add(f"{99 - number}")
    assert encode(first, "it") == encode(second, "it")


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::3],
        np.zeros((0, 4), dtype=np.uint16),
        np.array([1 + 2j]),
        np.array(["2026-01-01"], dtype="M8[s]"),
        np.array([True, False]),
        np.array(["ab", ""]),
        np.array([2**63], dtype=np.uint64),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_an_array_keeps_shape_dtype_order_and_bits(array: np.ndarray[Any, Any]) -> None:
    back = decode(encode({"x": array}, "it"))["x"]
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.dtype.byteorder == array.dtype.byteorder
    assert back.flags.f_contiguous is array.flags.f_contiguous or not array.flags.contiguous
    assert back.tobytes() == array.tobytes() and back.flags.writeable


_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.randn(3, 2, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(7),
    "empty": lambda: torch.empty(0, 4),
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "uint16": lambda: torch.tensor([65535], dtype=torch.uint16),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "trained": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", _TENSORS)
def test_a_tensor_keeps_its_bits_its_memory_format_and_whether_it_is_trained(kind: str) -> None:
    tensor = _TENSORS[kind]()
    back = decode(encode({"x": tensor}, "it"))["x"]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert type(back) is type(tensor) and back.requires_grad is tensor.requires_grad
    assert back.tolist() == tensor.tolist()
    if kind in ("transposed", "channels_last"):
        assert back.stride() == tensor.stride()


class Config(dict[str, int]):
    pass


_UNSUPPORTED: dict[str, tuple[Callable[[], object], str]] = {
    "function": (lambda: lambda: 0, r"it\.x\[0\] is a function, which cannot be saved"),
    "time": (lambda: datetime(2026, 1, 1), r"it\.x\[0\] is a datetime, which cannot be saved"),
    "subclass": (Config, r"it\.x\[0\] is a Config, which would come back as a dict"),
    "factory": (
        lambda: defaultdict(lambda: 3),
        r"it\.x\[0\] is a defaultdict whose default_factory is .*: use int",
    ),
    "local": (
        local_tuple,
        r"it\.x\[0\] is a local_tuple.<locals>.Local, .*top of a module",
    ),
    "cycle": (recursive, "contains itself"),
    "objects": (lambda: np.array([object()]), r"it\.x\[0\] is an array of object"),
    "records": (lambda: np.zeros(2, dtype=[("a", "i4")]), r"is an array of \[\('a', '<i4'\)\]"),
    "matrix": (lambda: np.ma.masked_array([1]), r"is a MaskedArray"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"it\.x\[0\] is sparse"),
    "meta": (lambda: torch.empty(2, device="meta"), r"it\.x\[0\] is on the meta device"),
    "key": (lambda: {torch.ones(1): 1}, "has a Tensor as a key"),
}


@pytest.mark.parametrize("kind", _UNSUPPORTED)
def test_a_value_that_would_come_back_as_another_is_named_with_its_path(kind: str) -> None:
    create, message = _UNSUPPORTED[kind]
    with pytest.raises(FunctionError, match=message):
        encode({"x": [create()]}, "it")
