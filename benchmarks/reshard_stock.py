"""PyTorch's side of `benchmarks.reshard`: DCP (distributed checkpoint) save and load on a disk.

    torchrun --nproc-per-node N -m benchmarks.reshard_stock PAIRS.json FOLDER OUT.jsonl

For each pair of meshes in PAIRS: the ranks of the first save their DTensors to FOLDER, those of
the second load into their own DTensors. Rank 0 writes a line per pair: seconds of save and of load.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.mesh_layouts import AXES, Parameter, layout_of, placements_of, random_state
from holdfast_workers.checkpoint.boxes import Box
from holdfast_workers.checkpoint.moves import box_of


def main() -> None:
    pairs_file, folder, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = json.loads(pairs_file.read_text())
    parameters = tuple(
        Parameter(**{**item, "shape": tuple(item["shape"])}) for item in config["parameters"]
    )
    state = random_state(parameters, config["seed"])
    for old, new in config["pairs"]:
        saved, loaded = _MeshRanks(old), _MeshRanks(new)
        path = folder / "checkpoint"
        source = saved.tensors(parameters, state)
        save_s = _timed(partial(saved.run, partial(dcp.save, source, checkpoint_id=path)))
        target = loaded.tensors(parameters, {})
        load_s = _timed(partial(loaded.run, partial(dcp.load, target, checkpoint_id=path)))
        expected = loaded.tensors(parameters, state)
        for name, tensor in target.items():
            bits = (entry.to_local().view(torch.int32) for entry in (tensor, expected[name]))
            if not torch.equal(
                *bits
            ):  # compared as integers: random bytes may be NaN, which equals nothing
                raise RuntimeError(f"{name} differs from the saved state: {old} to {new}")
        if dist.get_rank() == 0:
            shutil.rmtree(path)
            with out.open("a") as lines:
                lines.write(json.dumps([save_s, load_s]) + "\n")
        dist.barrier()
    dist.destroy_process_group()


class _MeshRanks:
    """The first ranks of the world as a mesh. Creating it is collective over all ranks."""

    def __init__(self, mesh: dict[str, int]) -> None:
        sizes = [mesh[axis] for axis in AXES]
        ranks = math.prod(sizes)
        self._sizes = mesh
        self._mesh = DeviceMesh("cpu", torch.arange(ranks).reshape(sizes), mesh_dim_names=AXES)
        self._group = dist.new_group(list(range(ranks)))
        self._inside = dist.get_rank() < ranks

    def tensors(
        self, parameters: tuple[Parameter, ...], state: dict[str, np.ndarray]
    ) -> dict[str, DTensor]:
        """This rank's shard of `state`, or zeros of the same shape."""
        if not self._inside:
            return {}
        layout = layout_of(parameters, self._sizes, dist.get_rank())
        found = {}
        for parameter, entry in zip(parameters, layout.tensors, strict=False):
            local = np.zeros(entry.shape, parameter.dtype)
            if state:
                whole = Box((0,) * len(entry.shape), entry.global_shape)
                local[...] = state[parameter.name][box_of(entry).within(whole)]
            size = torch.Size(parameter.shape)
            found[parameter.name] = DTensor.from_local(
                torch.from_numpy(local),
                self._mesh,
                placements_of(parameter, self._sizes),
                run_check=False,
                shape=size,
                stride=torch.empty(size, device="meta").stride(),
            )
        return found

    def run(self, work: Callable[..., object]) -> None:
        if self._inside:
            work(process_group=self._group)


def _timed(work: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
