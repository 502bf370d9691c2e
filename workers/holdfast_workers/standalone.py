"""Runs the training core alone: one process, or one rank under `torchrun`, without Ray or agents.

    python -m holdfast_workers.standalone job.yaml [--steps N] [--json out] [--device cuda]
    torchrun --nproc-per-node 4 -m holdfast_workers.standalone job.yaml

It runs the same recipe and step loop as the service, from step 0 to the last step, without fault
tolerance and checkpoints: the baseline of a comparison. Rank 0 prints progress; with `--json` it
also writes one JSON line per step (its row), one per digest, and a summary as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TextIO

import torch
import yaml
from pydantic import ValidationError

from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.node_cache.cached_file import cache_folder
from holdfast_workers.parallelize import process_groups
from holdfast_workers.protocol.findings import TripReport
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.published.weight_set import MANIFEST
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import (
    BYTE_VOCABULARY,
    OF_DEFAULT,
    SpecFault,
    TrainingSpec,
    find_faults,
    with_steps,
)
from holdfast_workers.token_sets.node_fetch import fetch
from holdfast_workers.training import rank_log
from holdfast_workers.training.determinism import choose_kernels
from holdfast_workers.training.guards import describe_trip
from holdfast_workers.training.mfu import flops_per_token, peak_flops
from holdfast_workers.training.recipe import Recipe, World
from holdfast_workers.training.step_loop import Hooks, Steps
from holdfast_workers.worker.first_weights import initialize_with_weights, published_weights_of

_WARM_UP_STEPS = 5
"""Steps that the summary's medians leave out: they compile, allocate and fill caches."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run :func:`main` and end the process without shutting down the interpreter.

    At interpreter shutdown, threads of process groups that have just been destroyed sometimes make
    C++ abort (see `process_groups.leave`), and `torchrun` then reports the whole run as failed.
    """
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run the job; the exit code is 0, or 2 if the spec has a fault."""
    options = _options(arguments)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        spec = load_spec(Path(options.job), steps=options.steps, world_size=world_size)
    except ValidationError as error:
        return _refuse(_faults_of_form(error))
    _add_code_to_path(Path(options.job))
    if found := find_faults(spec):
        return _refuse(found)
    device = _device(options.device)
    choose_kernels(spec.train.deterministic, device)
    cache_dir = options.cache_dir or cache_folder(os.environ)
    world = World(rank, world_size, spec.parallel.mesh, 0, device)
    with _fetching(spec, cache_dir) as read:
        _train(spec, options, world, cache_dir, read)
    return 0


def _refuse(faults: Iterable[SpecFault]) -> int:
    for fault in faults:
        print(f"{fault.path}: {fault.message}", file=sys.stderr)
    return 2


def _faults_of_form(error: ValidationError) -> Iterator[SpecFault]:
    """The invalid fields."""
    for each in error.errors(include_url=False):
        if each["type"] != OF_DEFAULT:
            yield SpecFault(path=".".join(map(str, each["loc"])), message=each["msg"])


@dataclass
class _ReadWindow:
    """The window of data of the step that this rank computes."""

    number: int = 0


@contextmanager
def _fetching(spec: TrainingSpec, cache_dir: Path) -> Iterator[_ReadWindow]:
    """Meanwhile one process of the node brings the token sets of the job into its cache, with the
    credentials of the environment. The ranks wait for the files, and learn why one is missing."""
    stop, read, open_set = threading.Event(), _ReadWindow(), cache(open_storage)

    def bring() -> None:
        try:
            fetch(spec, open_set, cache_dir, stop, lambda _: None, lambda: read.number)
        except Exception as error:  # its reason is left for the ranks
            print(f"the token sets are not fetched: {error!r}", file=sys.stderr)

    if spec.data.prepared and os.environ.get("LOCAL_RANK", "0") == "0":
        threading.Thread(target=bring, name="fetch", daemon=True).start()
    try:
        yield read
    finally:
        stop.set()


def _train(
    spec: TrainingSpec,
    options: argparse.Namespace,
    world: World,
    cache_dir: Path,
    read: _ReadWindow,
) -> None:
    recipe = lookup.make_recipe(spec, cache_dir)
    recipe.prepare()
    process_groups.join(
        os.environ.get("MASTER_ADDR", ""),
        int(os.environ.get("MASTER_PORT", "0")),
        0,
        world.rank,
        world.world_size,
        options.timeout_s,
        world.device,
    )
    recipe.build(world)
    out = open(options.json, "w") if options.json and world.rank == 0 else None  # noqa: PTH123, SIM115
    try:
        hooks = _ReportingHooks(recipe, world, spec, options.every, out, read)
        recipe.run(lambda: _first_steps(recipe, world, spec, hooks))
        hooks.finish()
    finally:
        if out is not None:
            out.close()
        process_groups.leave()


def _first_steps(recipe: Recipe, world: World, spec: TrainingSpec, hooks: Hooks) -> Steps:
    published = published_weights_of(spec)
    if published is None:
        recipe.initialize()
    else:
        initialize_with_weights(recipe, lambda: open_storage(published.uri).read(MANIFEST))
    return Steps(recipe, world, spec, hooks, 0)


def _add_code_to_path(path: Path) -> None:
    """Make the code folder of the job file importable, as on the cluster."""
    code = yaml.safe_load(path.read_text()).get("code")
    if isinstance(code, str) and not code.startswith("sha256:"):
        sys.path.insert(0, str((path.parent / code).resolve()))


def load_spec(path: Path, *, steps: int | None, world_size: int) -> TrainingSpec:
    """The training spec of a job file, without the sections of the control plane.

    A single process ignores the mesh of the file, so that any job can be tried in one process.
    """
    job = yaml.safe_load(path.read_text())
    if not isinstance(job, dict):
        raise ValueError(f"{path} is not a job spec: expected a YAML mapping")
    fields: dict[str, Any] = {k: v for k, v in job.items() if k in TrainingSpec.model_fields}
    if steps is not None:
        given = fields.get("train") or {}
        train_fields = {k: v for k, v in given.items() if k not in ("tokens", "epochs")}
        schedule = dict(train_fields.get("schedule") or {})
        warm_up = schedule.get("warmup_steps", 20)
        train_fields["steps"] = steps
        train_fields["schedule"] = {**schedule, "warmup_steps": min(warm_up, steps)}
        fields["train"] = train_fields
    if world_size == 1:
        fields["parallel"] = {}
    spec = TrainingSpec.model_validate(fields)
    spec = spec.model_copy(update={"train": with_steps(spec)})
    if spec.parallel.world_size != world_size:
        raise ValueError(
            f"the mesh {spec.parallel.mesh} needs {spec.parallel.world_size} processes, "
            f"not {world_size}"
        )
    return spec


class _ReportingHooks(Hooks):
    """Hooks of the step loop that only report: they print rows and write the JSON lines."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        spec: TrainingSpec,
        every: int,
        out: TextIO | None,
        read: _ReadWindow,
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._spec = spec
        self._every = every
        self._out = out
        self._read = read
        self._rows: list[StepRow] = []
        self._began = time.perf_counter()

    def phase(self, name: str, step: int, micro_batch: int = 0) -> None:
        self._read.number = self._recipe.guard_memory.ledger.window(step)

    def commit_gate(self, step: int) -> None:
        pass

    def evaluation_begins(self, step: int) -> None:
        pass

    def committed(self, row: StepRow) -> None:
        self._rows.append(row)
        self._write({"row": asdict(row)})
        if self._world.rank == 0 and (row.step % self._every == 0 or row.step == 1):
            print(rank_log.format_step(row), flush=True)

    def tripped(self, report: TripReport) -> None:
        self._write({"tripped": asdict(report)})
        if self._world.rank == 0:
            print(f"{report.decision}: {describe_trip(report)}", flush=True)

    def digest(self, step: int, hex: str, of_ranks: tuple[str, ...]) -> None:
        self._write({"digest": {"step": step, "hex": hex}})

    def finish(self) -> None:
        summary = self._summary()
        self._write({"summary": summary})
        if self._world.rank == 0:
            print(json.dumps(summary), flush=True)

    def _summary(self) -> dict[str, Any]:
        rows = self._rows[_WARM_UP_STEPS:] or self._rows
        step_time_s = median(row.step_time_s for row in rows)
        tokens_per_second = rows[-1].tokens / step_time_s
        summary: dict[str, Any] = {
            "steps": len(self._rows),
            "step_time_s": round(step_time_s, 6),
            "tokens_per_second": round(tokens_per_second, 1),
            "loss": self._rows[-1].loss,
            "world_size": self._world.world_size,
            "device": self._world.device,
            "wall_s": round(time.perf_counter() - self._began, 3),
        }
        return summary | self._utilisation(tokens_per_second)

    def _utilisation(self, tokens_per_second: float) -> dict[str, Any]:
        """The number of parameters and, on a device with a known peak, the MFU."""
        parameters = self._recipe.parameters()
        if parameters is None:
            return {}
        figures: dict[str, Any] = {"parameters": parameters}
        if self._world.device.startswith("cuda"):
            name = torch.cuda.get_device_name(self._world.device)
            figures["device_name"] = name
            figures["memory_bytes"] = torch.cuda.max_memory_allocated(self._world.device)
            if peak := peak_flops(name):
                vocabulary = self._spec.vocabulary or BYTE_VOCABULARY
                flops = flops_per_token(parameters, self._spec.model, vocabulary)
                peak_of_world = peak * self._world.world_size
                figures["mfu"] = round(flops * tokens_per_second / peak_of_world, 4)
        return figures

    def _write(self, line: dict[str, Any]) -> None:
        if self._out is not None:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()


def _device(requested: str) -> str:
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested != "cuda":
        return requested
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    return device


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast_workers.standalone")
    parser.add_argument("job", help="a job spec in YAML")
    parser.add_argument(
        "--steps", type=int, help="number of steps, instead of the job's train.steps"
    )
    parser.add_argument("--json", help="file for rows, digests and a summary, as JSON lines")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or cuda:N")
    parser.add_argument("--every", type=int, default=10, help="print every N-th step")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="timeout of each collective")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="folder that keeps the tokenized corpus between runs; default: the node's caches",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run()
