"""The training core alone on one device: its speed, and its losses beside the processor's."""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.support.ranks.rank_worlds import RecordingHooks

from benchmarks.gpu_parts.figures import CurveFigures, Setting, TrainingFigures
from holdfast_workers.parallelize import process_groups
from holdfast_workers.protocol.messages import StepRow
from holdfast_workers.recipes import lookup
from holdfast_workers.spec import Determinism, TrainingSpec
from holdfast_workers.training.determinism import choose_kernels
from holdfast_workers.training.mfu import flops_per_token, peak_flops
from holdfast_workers.training.recipe import World
from holdfast_workers.training.step_loop import Steps

LEAST_PARAMETERS = 1_000_000_000
WARM_UP_STEPS = 5
CURVE_STEPS, SMALL_CURVE_STEPS = 20, 6
CURVE_TOLERANCE = 1e-3
"""Of float32, relative: devices add in other orders, and twenty steps magnify it."""
WORDS = 2000
LARGE = {"dim": 2048, "layers": 22, "heads": 16, "sequence_length": 2048, "dtype": "bfloat16"}
"""A Llama of 1.11e9 parameters."""
LARGE_BATCH, LARGE_STEPS = 8, 25
SMALL = {"dim": 64, "layers": 2, "heads": 4, "sequence_length": 64}
SMALL_BATCH, SMALL_STEPS = 4, 8
CURVE_MODEL = {"dim": 128, "layers": 4, "heads": 4, "sequence_length": 128}


def strict(setting: Setting) -> TrainingFigures:
    return _speed(setting, "strict")


def fast(setting: Setting) -> TrainingFigures:
    return _speed(setting, "fast")


def curves(setting: Setting) -> CurveFigures:
    """Raises ValueError if the losses differ by more than the tolerance."""
    steps = SMALL_CURVE_STEPS if setting.small else CURVE_STEPS
    spec = training_spec(setting, CURVE_MODEL, 8, steps)
    losses = []
    for device in ("cpu", setting.device):
        choose_kernels("strict", device)
        _, rows = _train(spec, device, setting.folder)
        losses.append([row.loss for row in rows])
    found = max(abs(ours - its) / its for its, ours in zip(*losses, strict=True))
    if not found <= CURVE_TOLERANCE:
        raise ValueError(
            f"losses differ by {found:.1e} (tolerance {CURVE_TOLERANCE:g}): {losses[0]} on the "
            f"processor, {losses[1]} on {setting.device}"
        )
    return CurveFigures(steps, found, CURVE_TOLERANCE, losses[1][-1])


def training_spec(
    setting: Setting, model: dict[str, Any], batch: int, steps: int, **sections: Any
) -> TrainingSpec:
    """A job of one rank, one micro-batch a step, without digests and saves unless `sections` have
    them."""
    fields: dict[str, Any] = {
        "model": model,
        "data": {"source": str(_text(setting.folder))},
        "train": {
            "steps": steps,
            "global_batch": batch,
            "micro_batch": batch,
            "schedule": {"warmup_steps": 2},
        },
        "checkpoint": {"memory": {"every_steps": 0}, "digest_every_steps": 0},
    }
    return TrainingSpec.model_validate({**fields, **sections})


def _speed(setting: Setting, mode: Determinism) -> TrainingFigures:
    """Raises ValueError if the model is too small, or the loss does not fall."""
    compiles = not setting.small
    sizes = SMALL if setting.small else LARGE
    batch = SMALL_BATCH if setting.small else LARGE_BATCH
    steps = SMALL_STEPS if setting.small else LARGE_STEPS
    spec = training_spec(setting, {**sizes, "compile": compiles}, batch, steps)
    choose_kernels(mode, setting.device)
    parameters, rows = _train(spec, setting.device, setting.folder)
    if not setting.small and parameters < LEAST_PARAMETERS:
        raise ValueError(f"the model has {parameters:,} parameters, not {LEAST_PARAMETERS:,}")
    if not rows[-1].loss < rows[0].loss:
        raise ValueError(f"the loss did not fall: {[row.loss for row in rows]}")
    step_s = median(row.step_time_s for row in rows[WARM_UP_STEPS:])
    tokens_per_s = rows[-1].tokens / step_s
    measured = _matmul_flops(setting)
    known = peak_flops(torch.cuda.get_device_name(setting.device)) if setting.on_device else None
    peak = known or measured
    return TrainingFigures(
        parameters=parameters,
        dtype=spec.model.dtype,
        compiled=compiles,
        tokens_per_step=rows[-1].tokens,
        step_s=round(step_s, 6),
        tokens_per_s=round(tokens_per_s, 1),
        mfu=round(flops_per_token(parameters, spec.model) * tokens_per_s / peak, 4),
        peak_tflops=round(peak / 1e12, 3),
        peak_source="table" if known else "measured",
        matmul_tflops=round(measured / 1e12, 3),
        first_step_s=round(rows[0].step_time_s, 3),
        loss_first=rows[0].loss,
        loss_last=rows[-1].loss,
        memory_bytes=torch.cuda.max_memory_allocated(setting.device) if setting.on_device else 0,
    )


def _train(spec: TrainingSpec, device: str, folder: Path) -> tuple[int, list[StepRow]]:
    """The number of parameters, and the row of each step."""
    recipe = lookup.make_recipe(spec, folder / "corpus")
    recipe.prepare()
    world = World(0, 1, spec.parallel.mesh, attempt=0, device=device)
    hooks = RecordingHooks()
    try:
        recipe.build(world)
        recipe.initialize()
        steps = Steps(recipe, world, spec, hooks, 0)
        while not steps.over:
            steps.apply()
            steps.keep()
    finally:
        process_groups.leave()
    return recipe.parameters() or 0, hooks.rows


def _matmul_flops(setting: Setting) -> float:
    """FLOP/s of a product of square matrices, in bfloat16 on a device; the best of some."""
    size, dtype = (8192, torch.bfloat16) if setting.on_device else (512, torch.float32)
    left, right = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        _synchronize(setting)
        began = time.perf_counter()
        left @ right
        _synchronize(setting)
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def _synchronize(setting: Setting) -> None:
    if setting.on_device:
        torch.cuda.synchronize(setting.device)


def _text(folder: Path) -> Path:
    """A folder with a text of seeded sentences."""
    path = folder / "text" / "words.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        chance = random.Random(5)
        words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 8))) for _ in range(200)]
        lines = (" ".join(chance.choices(words, k=12)) + ".\n" for _ in range(WORDS))
        path.write_text("".join(lines))
    return path.parent
