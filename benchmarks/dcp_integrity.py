"""The number of damaged checkpoints that load without an error: PyTorch DCP against Holdfast.

The same state is saved once by stock `torch.distributed.checkpoint` and once by Holdfast's remote
tier. Both are then damaged in the same ways at seeded places (one bit of a file, a truncated file,
the rest of a file zeroed, a missing file) and loaded, with one damage at a time. A load raises,
returns the original state, or silently returns other bits; the last must not happen. The results
are counts, not times, and do not depend on the machine.

    python -m benchmarks.dcp_integrity --json
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.conditions import machine, print_json, report
from holdfast_workers.checkpoint.load import load_state
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import checkpoint_folder
from holdfast_workers.checkpoint.publish import finalize
from holdfast_workers.checkpoint.shards import save_shard
from holdfast_workers.state.rank_state import RankState, ShardBox, StateTensor

SPARE_BYTES = 8 << 30  # a damaged length field must not exhaust the memory of the machine
MESH = {"dp_shard": 1}
ATTEMPT, STEP = 1, 1
TENSORS, DIM = 12, 48

Files = dict[str, bytes]
State = dict[str, Tensor]

RAISES, UNHARMED, SILENT = "raises", "unharmed", "silently other bits"


@dataclass(frozen=True)
class IntegrityResult:
    """The last line: the number of loads by side; in `by_kind` also by damage and by their end."""

    silently_wrong: dict[str, int]
    seed: int
    by_kind: dict[str, dict[str, dict[str, int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--points", type=int, default=400, help="damages per kind and file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # torch logs every load
    warnings.simplefilter("ignore")
    limit = psutil.Process().memory_info().vms + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    report(json.dumps(machine()))
    with tempfile.TemporaryDirectory(prefix="holdfast-integrity-") as folder:
        found = {
            side.__name__.removeprefix("of_"): count(side(Path(folder)), options)
            for side in (of_stock, of_holdfast)
        }
    for side, kinds in found.items():
        for kind, ends in kinds.items():
            report(f"{side:9} {kind:45} " + ", ".join(f"{n} {end}" for end, n in ends.items()))
    if options.json:
        silent = {
            side: sum(k.get(SILENT, 0) for k in kinds.values()) for side, kinds in found.items()
        }
        print_json(IntegrityResult(silent, options.seed, found))


class LoadTarget:
    """A saved checkpoint: its files, and the function that loads them."""

    def __init__(self, folder: Path, wanted: State, load: Callable[[], State]) -> None:
        self._folder = folder
        self._wanted = wanted
        self._load = load
        self.files: Files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def load_with(self, name: str, content: bytes | None) -> str:
        """The result of loading when the file `name` has `content`, or is missing (None)."""
        path = self._folder / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        try:
            loaded = self._load()
        except (Exception, dcp.CheckpointException):  # any exception counts as detected
            return RAISES
        finally:
            path.write_bytes(self.files[name])
        same = all(_bits(loaded[key]) == _bits(value) for key, value in self._wanted.items())
        return UNHARMED if same else SILENT


def of_stock(folder: Path) -> LoadTarget:
    """Saved by `torch.distributed.checkpoint`, as in its documentation."""
    wanted, path = some_state(), folder / "stock"

    def load() -> State:
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(target, checkpoint_id=path, no_dist=True)
        return target

    dcp.save(wanted, checkpoint_id=path, no_dist=True)
    return LoadTarget(path, wanted, load)


def of_holdfast(folder: Path) -> LoadTarget:
    """Saved by Holdfast's remote tier."""
    wanted = some_state()
    snapshot = _rank_state(wanted).freeze({})
    layout = snapshot.layout
    payload = memoryview(bytearray(layout.payload_bytes))
    snapshot.write(payload)
    storage = LocalStorage(folder / checkpoint_folder(STEP, ATTEMPT))
    record = save_shard(storage, payload, layout, 0, ATTEMPT, STEP)
    finalize(storage, [json.loads(json.dumps(record))], MESH, {})

    def load() -> State:
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        loaded = memoryview(bytearray(layout.payload_bytes))
        load_state(storage, layout, loaded, mesh=MESH, rank=0)
        _rank_state(target).read(loaded)
        return target

    return LoadTarget(Path(storage.uri), wanted, load)


def some_state() -> State:
    """A small model state, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    state: State = {
        f"layer{number}.weight": torch.randn(DIM, DIM, generator=generator)
        for number in range(TENSORS)
    }
    return {**state, "step": torch.tensor([12345])}


def count(checkpoint: LoadTarget, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Number of loads per result, by file and kind of damage."""
    found: dict[str, Counter[str]] = {}
    for name, content in sorted(checkpoint.files.items()):
        places = random.Random(f"{options.seed}{name}")
        for harm, damage in DAMAGES.items():
            ends = found.setdefault(f"{name}: {harm}", Counter())
            for _point in range(options.points):
                ends[checkpoint.load_with(name, damage(content, places))] += 1
        found[f"{name}: missing"] = Counter([checkpoint.load_with(name, None)])
    return {kind: dict(ends) for kind, ends in found.items()}


def _flipped(content: bytes, places: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[places.randrange(len(content))] ^= 1 << places.randrange(8)
    return bytes(damaged)


def _cut(content: bytes, places: random.Random) -> bytes:
    return content[: places.randrange(len(content))]


def _zeroed(content: bytes, places: random.Random) -> bytes:
    start = places.randrange(len(content))
    return content[:start] + bytes(len(content) - start)


DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit changed": _flipped,
    "cut short": _cut,
    "zeros from some byte on": _zeroed,
}


def _rank_state(state: State) -> RankState:
    pieces = [
        StateTensor(
            name, value, ShardBox(tuple(value.shape), (0,) * value.dim(), tuple(value.shape), True)
        )
        for name, value in state.items()
    ]
    return RankState(pieces, [])


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


if __name__ == "__main__":
    main()
