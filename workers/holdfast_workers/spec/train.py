"""The sections `data` and `train`: what a run reads, and how it takes its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.spec.fields import NonNegative, Positive, Reference, Section

VOCABULARIES = {"bytes": 256}
"""Tokenizer -> size of its vocabulary."""


class DataSpec(Section):
    source: Reference = Field(
        default="python-stdlib",
        description="`python-stdlib`, or a path or glob of text files on every node. For vit: a "
        "folder on every node with a subfolder of images for each class.",
    )
    tokenizer: Literal["bytes"] = "bytes"


class OptimizerSpec(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8


class ScheduleSpec(Section):
    name: Literal["cosine", "constant"] = "cosine"
    warmup_steps: NonNegative = 20
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1


Determinism = Literal["strict", "fast"]


class TrainSpec(Section):
    steps: Positive = 300
    global_batch: Positive = Field(default=16, description="Samples per optimizer step.")
    micro_batch: Positive = Field(default=4, description="Samples per rank and forward pass.")
    seed: NonNegative = 7
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    deterministic: Determinism = Field(
        default="strict",
        description="strict: a step that is computed again has the same bits; on accelerators "
        "torch uses only kernels that repeat them, and an operation without one is an error. fast: "
        "any kernel; on accelerators two runs may differ in their last bits, digests prove "
        "nothing, and replicas are not compared by them.",
    )
