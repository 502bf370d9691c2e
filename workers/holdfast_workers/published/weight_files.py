"""The safetensors files of a published folder: which tensors they have, and where. No torch.

The format is 8 bytes of length, a JSON header of that length, and the tensors, without a gap or an
overlap (https://github.com/huggingface/safetensors#format). Pickles are refused: to read them runs
code.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast_workers.errors import WorkersError
from holdfast_workers.published.shown_values import shown, shown_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
BUFFER = ".rotary_emb.inv_freq"
"""The end of the name of a table that files may have, and that models compute."""
_TAG = "__float__"
"""The only key of an object that stands for Infinity, -Infinity or NaN, which is its value."""
_LARGEST_JSON = 100 << 20
"""Bytes of a header, an index or a configuration, as the format limits a header."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of each dtype that weights may have here."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OF_PATHS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EACCES, errno.EPERM),
    }
)
"""Errors of which a path or its permissions are the cause: a retry does not help."""


class UnfitWeights(WorkersError):
    """The folder has no weights that can be read here. Names the file and the reason."""


@dataclass(frozen=True)
class PublishedTensor:
    """A whole tensor, row by row, in one file."""

    name: str
    file: str
    dtype: str
    """As in the format: F32, F16 or BF16."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class WantedTensors:
    """The tensors that a model has."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name."""
    aliases: Mapping[str, str]
    """Names that files may have in place of these, or beside them."""
    is_ignored: Callable[[str], bool]
    """Whether the tensor of a name only repeats what the model has anyway."""


@contextmanager
def paths_refused() -> Iterator[None]:
    """Raise UnfitWeights for a path that does not exist or that this user may not read, and OSError
    for what may pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_PATHS:
            raise
        raise UnfitWeights(
            f"{error.filename}: {error.strerror}: every node must be able to read it, as user "
            f"{os.getuid()}"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, also behind symbolic links, to be read without a buffer. Raises UnfitWeights,
    OSError."""
    with paths_refused():
        # A pipe that nobody writes would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnfitWeights(f"{path} is no file")
        file = path.open("rb", buffering=0)
    with file:
        yield file


def read_json(path: Path) -> Any:
    """Raises UnfitWeights, OSError."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_JSON:
            raise UnfitWeights(f"{path} is larger than {_LARGEST_JSON} bytes")
        return _parsed(file.read(), f"{path} is not JSON")


def find_tensors(folder: Path) -> dict[str, PublishedTensor]:
    """The tensors of all weights files of a folder, by name. Raises UnfitWeights, OSError."""
    index = _read_index(folder)
    names = [SINGLE] if index is None else sorted(set(index.values()))
    found: dict[str, PublishedTensor] = {}
    for name in names:
        for tensor in _tensors_of(folder / name):
            if tensor.name in found:
                other = found[tensor.name].file
                raise UnfitWeights(
                    f"{folder}: {shown_name(tensor.name)} is in {other} and in {name}"
                )
            found[tensor.name] = tensor
    if index is not None:
        _compare(folder, index, found)
    return found


def _read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor as the index says; None: all are in one file."""
    names = {path.name for path in folder.iterdir()}
    has_index, has_single = INDEX in names, SINGLE in names
    if has_index and has_single:
        raise UnfitWeights(
            f"{folder} has {SINGLE} and {INDEX}: remove the one that is not of this model"
        )
    if has_single:
        return None
    if not has_index:
        raise UnfitWeights(_why_no_weights(folder, sorted(names)))
    index = read_json(folder / INDEX)
    weights = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weights, Mapping) or not weights:
        raise UnfitWeights(f"{folder / INDEX} has no weight_map")
    for name in weights.values():
        is_beside = isinstance(name, str) and Path(name).name == name
        if not is_beside or not name.endswith(".safetensors"):
            raise UnfitWeights(f"{folder / INDEX} names {shown(name)}, which is no file beside it")
        if name not in names:
            raise UnfitWeights(
                f"{folder} has no {shown_name(name)}, which its index names: copy it"
            )
    return dict(weights)


def _why_no_weights(folder: Path, names: Sequence[str]) -> str:
    if parts := [name for name in names if name.endswith(".safetensors")]:
        return (
            f"{folder} has {shown_name(parts[0])} and no {INDEX}, which names all parts: copy it "
            "too"
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"{folder} has its weights in {shown_name(pickles[0])}, a pickle, which runs code when "
            "it is read: convert them to safetensors"
        )
    return f"{folder} has neither {SINGLE} nor {INDEX}"


def _compare(folder: Path, index: Mapping[str, str], found: Mapping[str, PublishedTensor]) -> None:
    """Raises UnfitWeights if the index and the files do not have the same tensors."""
    for name in sorted({*index, *found}):
        indexed, file = index.get(name), found[name].file if name in found else None
        if indexed != file:
            raise UnfitWeights(
                f"{folder}: {shown_name(name)} is in {file or 'no file'}, and in "
                f"{indexed or 'no file'} as {INDEX} says: copy the files and their index from the "
                "same model"
            )


def _tensors_of(path: Path) -> list[PublishedTensor]:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LARGEST_JSON, size - 8):
            raise UnfitWeights(f"{path} is not of safetensors, or is cut off: copy it again")
        text = file.read(length)
    header = _parsed(text, f"{path} has a damaged header")
    if not isinstance(header, Mapping):
        raise UnfitWeights(f"{path} has a damaged header: it is not an object of JSON")
    start = 8 + length
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    tensors = [_tensor(path, name, entry, start) for name, entry in entries.items()]
    at = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes)):
        if tensor.begin != at:
            raise UnfitWeights(f"{path} is damaged at {shown_name(tensor.name)}: copy it again")
        at += tensor.nbytes
    if at != size:
        fault = "is cut off" if at > size else "has bytes that are of no tensor"
        raise UnfitWeights(f"{path} {fault}: it has {size} bytes, and not {at}: copy it again")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> PublishedTensor:
    try:
        dtype, shape = str(entry["dtype"]), _whole_numbers(entry["shape"])
        begin, end = _whole_numbers(entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnfitWeights(f"{path} has a damaged header at {shown_name(name)}") from error
    if dtype not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        raise UnfitWeights(
            f"{path}: {shown_name(name)} is {shown_name(dtype)}: weights of {known} are read here"
        )
    found = PublishedTensor(name, path.name, dtype, shape, start + begin)
    if end - begin != found.nbytes:
        raise UnfitWeights(
            f"{path} has a damaged header at {shown_name(name)}: its size is not its shape's"
        )
    return found


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Raises ValueError."""
    if not isinstance(values, Sequence) or any(type(x) is not int or x < 0 for x in values):
        raise ValueError(values)
    return tuple(values)


def _parsed(text: bytes, complaint: str) -> Any:
    """Numbers that JSON lacks are tagged, as transformers does. Raises UnfitWeights, also if an
    object of the text has a name twice."""
    try:
        return json.loads(
            text, object_pairs_hook=_with_unique_names, parse_constant=lambda name: {_TAG: name}
        )
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise UnfitWeights(f"{complaint}: {error}") from error


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown_name(name)} is there twice")
        found[name] = value
    return found
