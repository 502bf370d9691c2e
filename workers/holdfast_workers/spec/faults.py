"""The faults of a training spec, within a section and between sections. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_workers.spec.amount import AMOUNTS, amount_faults
from holdfast_workers.spec.data_faults import data_faults
from holdfast_workers.spec.evaluation_faults import evaluation_faults
from holdfast_workers.spec.model_faults import model_faults
from holdfast_workers.spec.optimization import optimization_faults
from holdfast_workers.spec.parallel import ParallelSpec
from holdfast_workers.spec.spec_fault import SpecFault
from holdfast_workers.spec.training import TrainingSpec


def find_faults(spec: TrainingSpec) -> list[SpecFault]:
    """Every fault that follows from the training spec alone, in the order of the spec."""
    if spec.brings_program:
        return [*_program_mesh_faults(spec.parallel)]
    faults: list[SpecFault] = []
    if spec.function_name is None:
        faults += [*model_faults(spec), *data_faults(spec), *evaluation_faults(spec)]
    train, parallel = spec.train, spec.parallel

    def add(path: str, message: str, *beside: str) -> None:
        faults.append(SpecFault(path=path, message=message, beside=beside))

    if spec.function_name is not None and parallel.cp > 1:
        add("parallel.cp", f"cp {parallel.cp} divides sequences of the built-in model only: use 1")
    if spec.function_name is not None and parallel.pp > 1:
        add("parallel.pp", f"pp {parallel.pp} divides layers of the built-in models only: use 1")
    if train.global_batch % train.micro_batch:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} is not a multiple of micro_batch "
            f"{train.micro_batch}",
            "train.micro_batch",
        )
    elif train.global_batch < train.micro_batch * parallel.data_parallel:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} has less than one micro_batch of "
            f"{train.micro_batch} for each of dp_replicate × dp_shard = {parallel.dp_replicate} × "
            f"{parallel.dp_shard} = {parallel.data_parallel} ranks",
            *("train.micro_batch", "parallel.dp_replicate", "parallel.dp_shard"),
        )
    faults += amount_faults(spec)
    steps, warm_up = train.steps, train.schedule.warmup_steps
    if spec.function_name is None and steps is not None and warm_up > steps:
        add(
            "train.schedule.warmup_steps",
            f"warmup_steps {warm_up} exceeds steps {steps}",
            *AMOUNTS,
        )
    if spec.function_name is None:
        faults += optimization_faults(train.optimizer, train.schedule, steps)
    elif train.ema is not None:
        add("train.ema", "a function averages its weights itself: remove ema")
    guards = spec.guards
    policies = (guards.nonfinite.policy, guards.loss_spike.policy, guards.grad_norm_spike.policy)
    if "rollback" in policies and guards.rollback_steps > guards.max_skips:
        add(
            "guards.rollback_steps",
            f"a rollback skips {guards.rollback_steps} windows; max_skips {guards.max_skips} "
            "allows fewer",
            "guards.max_skips",
        )
    return faults


def _program_mesh_faults(parallel: ParallelSpec) -> Iterator[SpecFault]:
    for axis in ("pp", "cp", "tp"):
        size = getattr(parallel, axis)
        if size > 1:
            message = (
                f"{axis} {size} divides built-in models only: a program divides its model itself; "
                f"remove {axis}, and set dp_shard to the number of ranks"
            )
            yield SpecFault(path=f"parallel.{axis}", message=message)
