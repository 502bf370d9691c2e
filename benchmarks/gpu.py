"""Everything that needs a GPU, on a machine with one, in at most ten minutes; without Ray.

    python -m benchmarks.gpu --json                          # `make gpu`
    python -m benchmarks.gpu --device cpu --small --json     # the same code without a GPU

Each part runs in a process of its own with a deadline. A part that fails reports its error in the
result, and the others go on; the exit code is then 1. No part touches a device in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_parts import processes
from benchmarks.gpu_parts.figures import GpuResult, Setting

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SHARED_MEMORY = Path("/dev/shm")
ROOM_BYTES = 2 << 30
"""Free shared memory without which memory checkpoints lie among the temporary files."""
BUDGET_S = 570.0
"""For all parts together."""
NAME_S = 20.0
PACKAGES = ("torch", "triton", "nvidia-ml-py", "numpy")
ONLY_ON_DEVICES = "it has no meaning on a processor"


@dataclass(frozen=True)
class Part:
    """A part is named by its code, `module:function`, which returns its figures."""

    code: str
    deadline_s: float
    on_processor: bool = True


PARTS: Mapping[str, Part] = {
    "nvml": Part("device:nvml", 20.0, on_processor=False),
    "curves": Part("training:curves", 60.0),
    "communicator": Part("device:communicator", 60.0),
    "fork": Part("ranks:fork", 60.0),
    "kill": Part("ranks:kill", 120.0),
    "staging": Part("staging:staging", 120.0),
    "training": Part("training:strict", 150.0),
    "training_fast": Part("training:fast", 150.0),
}
"""In this order: the shortest first, so that little time is lost to a device that does not work."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before torch is imported: no thread pool to fork
    _import_torch()
    shared = SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > ROOM_BYTES else None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-gpu-"))
    memory = Path(tempfile.mkdtemp(prefix="holdfast-test-gpu-", dir=shared))
    try:
        setting = Setting(options.device, options.small, folder, memory)
        result = measure(setting, options.parts, options.budget_s)
    finally:  # a part that was killed has removed nothing
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    for name, error in result.errors.items():
        print(f"{name} failed: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(result), allow_nan=False), flush=True)
    return 1 if result.errors else 0


def measure(setting: Setting, names: list[str], budget_s: float) -> GpuResult:
    """Run the parts one after the other, within the budget."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    left_out: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in (name for name in PARTS if name in names):
        part = PARTS[name]
        if not setting.on_device and not part.on_processor:
            left_out[name] = ONLY_ON_DEVICES
            continue
        started = time.monotonic()
        limit_s = max(0.0, min(part.deadline_s, budget_s - (started - began)))
        _report(f"{name} (at most {limit_s:.0f} s)")
        try:
            found[name] = processes.run_part(partial(_run, part, setting), limit_s)
        except processes.PartFailed as error:
            errors[name] = str(error)
        seconds[name] = round(time.monotonic() - started, 1)
        _report(f"{name}: {found.get(name, errors.get(name))}")
    left_out |= {name: "not chosen" for name in PARTS if name not in names}
    return GpuResult(
        device=setting.device,
        device_name=_device_name(setting),
        versions=_versions(),
        **found,
        errors=errors,
        left_out=left_out,
        seconds=seconds,
    )


def _run(part: Part, setting: Setting) -> DataclassInstance:
    from importlib import import_module

    module, function = part.code.split(":")
    code: Callable[[Setting], DataclassInstance] = getattr(
        import_module(f"benchmarks.gpu_parts.{module}"), function
    )
    found = code(setting)
    json.dumps(asdict(found), allow_nan=False)  # a figure that is not a number fails its part alone
    return found


def _import_torch() -> None:
    """Import what all parts need: it touches no device and starts no thread."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    torch.set_num_threads(1)


def _device_name(setting: Setting) -> str:
    """Asked in a process of its own, so that this one has no context of a device."""
    if not setting.on_device:
        return platform.processor() or platform.machine()
    try:
        return processes.run_part(partial(_ask_name, setting.device), NAME_S)
    except processes.PartFailed as error:
        return f"unknown: {error}"


def _ask_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _report(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the result as the last line")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 or cpu")
    parser.add_argument("--small", action="store_true", help="sizes that take seconds on a CPU")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all parts together")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
