"""What a training run is: the part of a job spec that the data plane needs, as immutable values.

These models are the single source of the sections `model`, `data`, `train`, `parallel`,
`checkpoint`, `detection` and `guards`; the service's job spec embeds them and adds what only the
control plane knows (name, resources, recovery). Faults that concern one section or the relation
between sections of a training run are found by :func:`faults`; those that need the cluster are the
service's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
FIRST_MEMORY_STEPS = 2
FIRST_REMOTE_STEPS = 20
"""Where `auto` begins: so that steps with and without a save can be compared soon."""

HISTORY_STEPS = 256
"""Of so many steps the state remembers loss and gradient norm, for the guards."""


BUILT_IN_RECIPES = ("pretrain",)
"""Names a spec's `recipe` may have without a module; known here so that nobody imports torch to
check a spec."""


def _steps_or_auto(given: object) -> object:
    """One message for both; a union would name each of its halves."""
    if given == "auto" or (type(given) is int and given >= 0):
        return given
    raise PydanticCustomError("steps_or_auto", "input should be a whole number of steps, or auto")


Every = Annotated[
    int | Literal["auto"],
    PlainValidator(_steps_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]


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

    dp_replicate: Positive = Field(
        default=1, description="replicas of the whole state, which share the data between them"
    )
    dp_shard: Positive = 1
    tp: Positive = 1

    @property
    def mesh(self) -> dict[str, int]:
        """`dp_replicate` is an axis only where there are replicas."""
        replicas = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        return {**replicas, "dp_shard": self.dp_shard, "tp": self.tp}

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples, tensor-parallel peers counted once."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tp

    @property
    def words(self) -> str:
        """The world as a product, for messages."""
        return f"{' × '.join(self.mesh)} = {' × '.join(str(size) for size in self.mesh.values())}"


class MemoryTierSpec(Section):
    every_steps: Every = Field(
        default=1, description="0 turns the memory tier off; auto: as often as pays"
    )
    copies: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1, description="copies in the memory of other nodes; 0: own memory only"
    )

    @property
    def partner_copies(self) -> int:
        """Copies to be made of what there is in memory; none if the tier is off."""
        return self.copies if self.every_steps else 0


class KeepBestSpec(Section):
    """Which checkpoints count as the best: by what the step's row said."""

    metric: Literal["loss", "grad_norm"] = "loss"
    mode: Literal["min", "max"] = "min"
    n: Positive = Field(default=1, description="the best so many stay")


class RemoteTierSpec(Section):
    uri: str | None = Field(
        default=None,
        description="a path, file:///path or s3://bucket/prefix; null: in the data directory",
    )
    endpoint: str | None = Field(
        default=None, description="URL of an S3 service; null: AWS, or AWS_ENDPOINT_URL"
    )
    region: str | None = Field(default=None, description="of the bucket; null: AWS_DEFAULT_REGION")
    secret: str | None = Field(
        default=None,
        description="name of the server's secret with the credentials; null: AWS_ACCESS_KEY_ID and "
        "its like in the environment of the server and of all nodes",
    )
    every_steps: Every = Field(
        default=100, description="0: only the last step is saved; auto: as often as pays"
    )
    keep: Positive = Field(default=3, description="the newest so many stay")
    keep_every: Positive | None = Field(
        default=None, description="steps that are a multiple of it stay for good"
    )
    keep_best: KeepBestSpec | None = Field(
        default=None, description="the best by a metric stay, too"
    )


class CheckpointSpec(Section):
    memory: MemoryTierSpec = MemoryTierSpec()
    remote: RemoteTierSpec = RemoteTierSpec()
    final_save_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="how long the last state of a job that is cancelled or paused may take to "
        "reach the remote tier; 0: what is there already must do",
    )
    overhead_target: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.01, description="share of the time that a tier of `auto` may cost"
    )
    digest_every_steps: NonNegative = Field(
        default=1, description="digest of the whole state, as proof of P2; 0 turns it off"
    )

    @property
    def first_intervals(self) -> tuple[int, int]:
        """Steps between two saves to memory, and to the remote tier, when training begins."""
        memory, remote = self.memory.every_steps, self.remote.every_steps
        return (
            FIRST_MEMORY_STEPS if memory == "auto" else memory,
            FIRST_REMOTE_STEPS if remote == "auto" else remote,
        )


class DetectionSpec(Section):
    """When a rank that gives no sign of life is suspected of hanging. All of it is learned from the
    job's own history (`progress/hang_limits.py`); what is set here, holds instead."""

    enabled: bool = Field(
        default=True, description="false: a hang ends with `collective_timeout_s`"
    )
    hang_floor_s: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="no limit that is learned is under this"
    )
    hang_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0, description="a limit over the 99.9th percentile of what was seen"
    )
    first_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="for a phase that nothing is known of yet"
    )
    limits: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="seconds by phase (`forward`, `load`, ...), instead of learned ones"
    )
    stall_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="a running job that makes no step for so long, or for as long as a phase may "
        "take, is formed anew, whoever is to blame",
    )
    replace_stragglers: bool = Field(
        default=True,
        description="leave a node on which a rank computes more slowly than its peers, if another "
        "one is ready",
    )
    straggler_patience_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="how long it must have been slow"
    )
    collective_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="after which a collective fails by itself, as a last resort"
    )


class NonfiniteGuardSpec(Section):
    policy: Literal["skip", "rollback", "stop"] = Field(
        default="skip", description="a step that is not finite is never applied"
    )


class SpikeGuardSpec(Section):
    policy: Literal["off", "report", "skip", "rollback", "stop"] = "report"
    z: Annotated[float, Field(gt=0)] = Field(
        default=12.0, description="so many deviations above the median of the steps before"
    )


class GuardsSpec(Section):
    """What is done with a step whose loss or gradients are out of bounds."""

    nonfinite: NonfiniteGuardSpec = NonfiniteGuardSpec()
    loss_spike: SpikeGuardSpec = SpikeGuardSpec()
    grad_norm_spike: SpikeGuardSpec = SpikeGuardSpec()
    window: Annotated[int, Field(ge=16, le=HISTORY_STEPS)] = Field(
        default=64, description="steps that a spike is measured against"
    )
    warmup_steps: NonNegative = Field(
        default=100, description="until then, nothing is called a spike"
    )
    rollback_steps: Positive = Field(
        default=2, description="how far a rollback goes back; memory holds the last two steps"
    )
    max_skips: NonNegative = Field(
        default=8, description="windows of data that may be skipped among the last skip_span"
    )
    skip_span: Positive = 100


class ChecksSpec(Section):
    replica_digest_every_steps: NonNegative = Field(
        default=1,
        description="steps between two comparisons of the replicas along dp_replicate, at the "
        "most; 0: none. What was computed since the last one before a flipped bit is found is "
        "not used any more: with 1 that is a step or two, which memory holds",
    )


class TrainingSpec(Section):
    """One training run: of a recipe (a built-in name or `package.module:attribute`), or of a
    function of the user's, which brings its own model and data."""

    recipe: str = "pretrain"
    function: str | None = Field(
        default=None,
        description="`package.module:attribute`: called with a context, instead of a recipe; the "
        "sections model and data, optimizer and schedule are then its own affair",
    )
    config: dict[str, Any] = Field(default={}, description="what the function finds as ctx.config")
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    train: TrainSpec = TrainSpec()
    parallel: ParallelSpec = ParallelSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    detection: DetectionSpec = DetectionSpec()
    guards: GuardsSpec = GuardsSpec()
    checks: ChecksSpec = ChecksSpec()


class Fault(BaseModel):
    """One thing that makes a spec impossible: where it stands, and what to do about it."""

    model_config = ConfigDict(frozen=True)

    path: str
    message: str


def faults(spec: TrainingSpec) -> list[Fault]:
    """Every fault that follows from the training spec alone, in the order of the spec."""
    found: list[Fault] = [] if spec.function is not None else _model_faults(spec)
    train, parallel = spec.train, spec.parallel

    def add(path: str, message: str) -> None:
        found.append(Fault(path=path, message=message))

    per_pass = train.micro_batch * parallel.data_parallel
    if train.global_batch % per_pass:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} is not a multiple of micro_batch × dp_replicate × "
            f"dp_shard = {train.micro_batch} × {parallel.dp_replicate} × {parallel.dp_shard} = "
            f"{per_pass}",
        )
    if spec.function is None and train.schedule.warmup_steps > train.steps:
        add(
            "train.schedule.warmup_steps",
            f"warmup_steps {train.schedule.warmup_steps} exceeds steps {train.steps}",
        )
    guards = spec.guards
    policies = (guards.nonfinite.policy, guards.loss_spike.policy, guards.grad_norm_spike.policy)
    if "rollback" in policies and guards.rollback_steps > guards.max_skips:
        add(
            "guards.rollback_steps",
            f"a rollback skips {guards.rollback_steps} windows; max_skips {guards.max_skips} "
            "allows fewer",
        )
    return found


def _model_faults(spec: TrainingSpec) -> list[Fault]:
    """Of the built-in model, and of how it is to be cut."""
    found: list[Fault] = []
    model, parallel = spec.model, spec.parallel
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
    return found
