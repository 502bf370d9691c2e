"""How many damaged checkpoints are loaded as if nothing were wrong: torch's own and Holdfast's.

The same state is saved once by stock `torch.distributed.checkpoint` and once by Holdfast's remote
tier. Then each is damaged in the same ways at seeded places (one bit of one file, a file cut
short, the rest of a file gone to zeros, a file missing) and loaded, each damage by itself. A load
raises, gives back the state as it was, or gives back other bits and says nothing; the last is what
must not happen. Counts, not times: they do not depend on the machine.

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

SPARE_BYTES = 8 << 30  # a damaged length must not take the machine down
MESH = {"dp_shard": 1}
ATTEMPT, STEP = 1, 1
TENSORS, DIM = 12, 48

Files = dict[str, bytes]
State = dict[str, Tensor]

RAISES, UNHARMED, SILENT = "raises", "unharmed", "silently other bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--points", type=int, default=400, help="damages of each kind and file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # torch tells of every load
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
        summary = {
            side: sum(k.get(SILENT, 0) for k in kinds.values()) for side, kinds in found.items()
        }
        print_json({"silently_wrong": summary, "seed": options.seed, "by_kind": found})


class DamagedCopy:
    """A saved state: its files, and how it is loaded from them."""

    def __init__(self, folder: Path, wanted: State, load: Callable[[], State]) -> None:
        self._folder = folder
        self._wanted = wanted
        self._load = load
        self.files: Files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def load_with(self, name: str, content: bytes | None) -> str:
        """How loading ends where the file `name` has that content, or is missing."""
        path = self._folder / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        try:
            loaded = self._load()
        except (Exception, dcp.CheckpointException):  # whatever it says: it did not go unnoticed
            return RAISES
        finally:
            path.write_bytes(self.files[name])
        same = all(_bits(loaded[key]) == _bits(value) for key, value in self._wanted.items())
        return UNHARMED if same else SILENT


def of_stock(folder: Path) -> DamagedCopy:
    """By `torch.distributed.checkpoint`, as its documentation has it."""
    wanted, path = some_state(), folder / "stock"

    def load() -> State:
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        dcp.load(target, checkpoint_id=path, no_dist=True)
        return target

    dcp.save(wanted, checkpoint_id=path, no_dist=True)
    return DamagedCopy(path, wanted, load)


def of_holdfast(folder: Path) -> DamagedCopy:
    """By Holdfast's remote tier."""
    wanted = some_state()
    snapshot = _rank_state(wanted).freeze({})
    layout = snapshot.layout
    payload = memoryview(bytearray(layout.payload_bytes))
    snapshot.write(payload)
    at = LocalStorage(folder / checkpoint_folder(STEP, ATTEMPT))
    record = save_shard(at, payload, layout, 0, ATTEMPT, STEP)
    finalize(at, [json.loads(json.dumps(record))], MESH, {})

    def load() -> State:
        target = {name: torch.zeros_like(value) for name, value in wanted.items()}
        loaded = memoryview(bytearray(layout.payload_bytes))
        load_state(at, layout, loaded, mesh=MESH, rank=0)
        _rank_state(target).read(loaded)
        return target

    return DamagedCopy(Path(at.uri), wanted, load)


def some_state() -> State:
    generator = torch.Generator().manual_seed(7)
    state: State = {
        f"layer{number}.weight": torch.randn(DIM, DIM, generator=generator)
        for number in range(TENSORS)
    }
    return {**state, "step": torch.tensor([12345])}


def count(checkpoint: DamagedCopy, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """How many loads end how, by file and kind of damage."""
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
    at = places.randrange(len(content))
    return content[:at] + bytes(len(content) - at)


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
