"""What a training run is: the part of a job spec that the data plane needs, as immutable values.

These models are the single source of the sections `model`, `data`, `train`, `parallel` and
`checkpoint`; the service's job spec embeds them and adds what only the control plane knows
(name, resources, recovery). Faults that concern one section or the relation between sections of
a training run are found by :func:`faults`; those that need the cluster are the service's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Every axis the design knows, outermost first. This version builds `dp_shard` and `tp`."""


BUILT_IN_RECIPES = ("pretrain",)
"""Names a spec's `recipe` may have without a module; known here so that nobody imports torch to
check a spec."""


class Section(BaseModel):
    """A section of a spec: immutable, and unknown keys are refused rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSpec(Section):
    family: Literal["llama"] = "llama"
    dim: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive | None = Field(default=None, description="null: as many as heads")
    ffn_dim: Positive | None = Field(default=None, description="null: 8/3 of dim, rounded up to 64")
    sequence_length: Positive = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="compute dtype; parameters are kept in float32"
    )
    compile: bool = False


class DataSpec(Section):
    source: str = Field(
        default="python-stdlib",
        description="`python-stdlib`, or a path or glob of text files on every node",
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


class TrainSpec(Section):
    steps: Positive = 300
    global_batch: Positive = Field(default=16, description="samples per optimizer step")
    micro_batch: Positive = Field(default=4, description="samples per rank per forward")
    seed: NonNegative = 7
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class ParallelSpec(Section):
    """Sizes of the mesh axes, outermost first; the world is their product."""

    dp_shard: Positive = 1
    tp: Positive = 1

    @property
    def mesh(self) -> dict[str, int]:
        return {"dp_shard": self.dp_shard, "tp": self.tp}

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.tp


class MemoryTierSpec(Section):
    every_steps: NonNegative = Field(default=1, description="0 turns the memory tier off")


class RemoteTierSpec(Section):
    uri: str | None = Field(default=None, description="null: the control plane's data directory")
    every_steps: NonNegative = Field(default=100, description="0: only the last step is saved")
    keep: Positive = 3


class CheckpointSpec(Section):
    memory: MemoryTierSpec = MemoryTierSpec()
    remote: RemoteTierSpec = RemoteTierSpec()
    digest_every_steps: NonNegative = Field(
        default=1, description="digest of the whole state, as proof of P2; 0 turns it off"
    )


class TrainingSpec(Section):
    """One training run. `recipe` is a built-in name or `package.module:attribute`."""

    recipe: str = "pretrain"
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    train: TrainSpec = TrainSpec()
    parallel: ParallelSpec = ParallelSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()


class Fault(BaseModel):
    """One thing that makes a spec impossible: where it stands, and what to do about it."""

    model_config = ConfigDict(frozen=True)

    path: str
    message: str


def faults(spec: TrainingSpec) -> list[Fault]:
    """Every fault that follows from the training spec alone, in the order of the spec."""
    found: list[Fault] = []
    model, train, parallel = spec.model, spec.train, spec.parallel
    kv_heads = model.kv_heads or model.heads

    def add(path: str, message: str) -> None:
        found.append(Fault(path=path, message=message))

    if model.dim % model.heads:
        add("model.heads", f"dim {model.dim} is not divisible by heads {model.heads}")
    elif (model.dim // model.heads) % 2:
        add(
            "model.heads", f"head size {model.dim // model.heads} must be even for rotary positions"
        )
    if model.heads % kv_heads:
        add("model.kv_heads", f"heads {model.heads} is not divisible by kv_heads {kv_heads}")
    if model.heads % parallel.tp:
        add("parallel.tp", f"heads {model.heads} is not divisible by tp {parallel.tp}")
    if kv_heads % parallel.tp:
        add("parallel.tp", f"kv_heads {kv_heads} is not divisible by tp {parallel.tp}")
    if model.sequence_length % parallel.tp:
        add(
            "parallel.tp",
            f"sequence_length {model.sequence_length} is not divisible by tp {parallel.tp}",
        )
    if model.ffn_dim is not None and model.ffn_dim % parallel.tp:
        add("parallel.tp", f"ffn_dim {model.ffn_dim} is not divisible by tp {parallel.tp}")
    per_pass = train.micro_batch * parallel.dp_shard
    if train.global_batch % per_pass:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} is not a multiple of micro_batch × dp_shard = "
            f"{train.micro_batch} × {parallel.dp_shard} = {per_pass}",
        )
    if train.schedule.warmup_steps > train.steps:
        add(
            "train.schedule.warmup_steps",
            f"warmup_steps {train.schedule.warmup_steps} exceeds steps {train.steps}",
        )
    return found
