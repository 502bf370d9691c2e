"""The specification of a training run: the part of a job spec that the data plane needs.

These immutable models are the single source of the sections `model`, `data`, `train`, `parallel`,
`checkpoint`, `detection` and `guards`. The service's job spec embeds them and adds the sections of
the control plane (name, resources, recovery). :func:`find_faults` finds the faults within a section
and between sections; the service finds those that depend on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Reference = Annotated[str, Field(max_length=4096)]
"""A path, a URI or a name; no path of Linux is longer."""
FIRST_MEMORY_STEPS = 2
FIRST_REMOTE_STEPS = 20
"""The initial intervals of `auto`, so that steps with and without a save can soon be compared."""

HISTORY_STEPS = 256
"""The number of steps whose loss and gradient norm the state stores for the guards."""


BUILT_IN_RECIPES = ("pretrain",)
"""Names that a spec's `recipe` may have without a module; listed here so that checking a spec does
not import torch."""


def _steps_or_auto(value: object) -> object:
    """One error message for both types; a union would report one for each of its members."""
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    raise PydanticCustomError("steps_or_auto", "input should be a whole number of steps, or auto")


Every = Annotated[
    int | Literal["auto"],
    PlainValidator(_steps_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]


class Section(BaseModel):
    """A section of a spec: immutable; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


ActivationCheckpointing = Literal["none", "full", "selective"]


class RopeScalingSpec(Section):
    """Rotary positions for longer sequences than a model was first trained on."""

    type: Literal["linear", "llama3"] = Field(
        description="linear: every frequency is divided by `factor` (position interpolation). "
        "llama3: only low frequencies are, as in Llama 3.1."
    )
    factor: Annotated[float, Field(ge=1)] = 8.0
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0,
        description="llama3: a wave longer than `original_sequence_length` by this is divided "
        "wholly.",
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=4.0,
        description="llama3: a wave shorter than `original_sequence_length` by this is kept.",
    )
    original_sequence_length: Positive = Field(
        default=8192, description="llama3: the sequence length of the first training."
    )


Family = Literal["llama", "vit"]


class ModelSpec(Section):
    family: Family = Field(
        default="llama",
        description="llama: a language model, of bytes of text. vit: a Vision Transformer, which "
        "classifies images.",
    )
    dim: Positive = 128
    layers: Annotated[int, Field(ge=1, le=10_000)] = 4
    heads: Positive = 4
    kv_heads: Positive | None = Field(
        default=None, description="Number of key and value heads. null: the same as `heads`."
    )
    ffn_dim: Positive | None = Field(
        default=None,
        description="Hidden size of the feed-forward layer. null: 8/3 of `dim`, rounded up to a "
        "multiple of 64; for vit 4 times `dim`.",
    )
    sequence_length: Positive = 256
    image_size: Positive | None = Field(
        default=None, description="vit: height and width to which images are brought, in pixels."
    )
    patch_size: Positive | None = Field(
        default=None, description="vit: height and width of a patch, in pixels."
    )
    classes: Positive | None = Field(
        default=None, description="vit: number of classes, as many as the data has."
    )
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScalingSpec | None = None
    tied_embeddings: bool = Field(
        default=False, description="Whether the head uses the embedding's weight."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Compute dtype. Parameters are stored in float32."
    )
    compile: bool = False
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="What the backward pass computes again instead of keeping it in memory. full: "
        "all of a block; selective: all but matrix products and attention. The bits are the same.",
    )
    activation_checkpointing_every: Positive = Field(
        default=1, description="Of the blocks, each so manyth is checkpointed, from the first on."
    )

    @property
    def positions(self) -> int:
        """Length of the sequence that the blocks get: tokens of a text, or patches of an image."""
        if self.family == "llama":
            return self.sequence_length
        images = self.images
        return (images.image_size // images.patch_size) ** 2

    @property
    def images(self) -> ImageSizes:
        """The sizes of the family `vit`. Raises ValueError if one is not set."""
        if self.image_size is None or self.patch_size is None or self.classes is None:
            raise ValueError("the family vit needs image_size, patch_size and classes")
        return ImageSizes(self.image_size, self.patch_size, self.classes)


@dataclass(frozen=True)
class ImageSizes:
    """Of square images and patches, in pixels; and the number of classes."""

    image_size: int
    patch_size: int
    classes: int

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: three channels of each pixel."""
        return 3 * self.patch_size**2


NEAR_SIZES = 4096
"""How far from a refused size of an axis a legal one is searched."""

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


Zero = Literal[1, 2, 3]
ContextMethod = Literal["all_gather", "ring", "ulysses"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class ParallelSpec(Section):
    """Sizes of the mesh axes, outermost first; the world size is their product."""

    pp: Positive = Field(default=1, description="Number of groups of ranks that divide the layers.")
    dp_replicate: Positive = Field(
        default=1,
        description="Number of replicas of the whole state. The data is divided among them.",
    )
    dp_shard: Positive = 1
    cp: Positive = Field(default=1, description="Number of ranks that divide each sequence.")
    tp: Positive = 1
    zero: Zero | None = Field(
        default=None,
        description="What the ranks of `dp_shard` hold in pieces during a step (ZeRO). 1: only the "
        "optimizer's state. 2: gradients too, from each micro-batch on. 3: parameters too, but for "
        "the block that computes. null: 1, and for models above 64 MiB with parameters as in 3 "
        "until the backward pass. Between steps everything is in pieces.",
    )

    context_method: ContextMethod = Field(
        default="all_gather",
        description="How the ranks of `cp` attend to each other's positions. all_gather: each "
        "gathers all keys and values; good with few key and value heads. ring: these go round in "
        "blocks, so that no rank has all of them; for the longest sequences. ulysses: each rank "
        "gets all positions of some heads; sends least with many key and value heads, whose number "
        "must be a multiple of `cp`.",
    )
    schedule: Schedule = Field(
        default="1f1b",
        description="The order of a pipeline's micro-batches. gpipe: all forward passes first. "
        "1f1b: forward and backward in turns, which keeps fewer activations. interleaved: 1f1b "
        "with several stages per rank, which waits less. zero_bubble: two stages per rank, along "
        "a V, and the gradients of weights are computed where a rank would wait (ZBV).",
    )
    stages_per_rank: Positive | None = Field(
        default=None,
        description="Number of stages of each rank of `pp`. null: 2 for interleaved and "
        "zero_bubble, else 1.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether `tp` divides the sequence where it does not divide the layers: the "
        "residual stream, its norms and dropout.",
    )
    vocabulary_parallel: bool = Field(
        default=False,
        description="Whether `tp` divides embedding, head and the loss, by parts of the "
        "vocabulary.",
    )

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes; `pp`, `dp_replicate` and `cp` are axes only if they divide something."""
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        return {axis: n for axis, n in sizes.items() if n > 1 or axis in ("dp_shard", "tp")}

    def why_no_schedule(self, micro_batches: int, pp: int | None = None) -> str:
        """Why `schedule` cannot order so many micro-batches of a step and data-parallel rank on
        `pp` stages, or those of the spec; "" if it can."""
        stages = pp or self.pp
        rounds = max(1, micro_batches // stages)
        if stages == 1 or self.schedule != "interleaved" or micro_batches % rounds == 0:
            return ""
        return (
            f"schedule interleaved wants micro-batches in equal rounds of about {stages}, and each "
            f"data-parallel rank has {micro_batches}: use {micro_batches // stages * stages} or "
            f"{-(-micro_batches // stages) * stages}, or another schedule"
        )

    @property
    def stages_on_a_rank(self) -> int:
        """`stages_per_rank`, or its default."""
        several = self.schedule in ("interleaved", "zero_bubble")
        return self.stages_per_rank or (2 if several else 1)

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or groups of ranks, that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def product(self) -> str:
        """The world as a product, for messages."""
        return f"{' × '.join(self.mesh)} = {' × '.join(str(size) for size in self.mesh.values())}"


class MemoryTierSpec(Section):
    every_steps: Every = Field(
        default=1,
        description="Steps between two saves to memory. 0: the memory tier is off. auto: Holdfast "
        "measures the best interval.",
    )
    copies: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1,
        description="Copies of each shard in the memory of other nodes. 0: only in the memory of "
        "its own node.",
    )

    @property
    def partner_copies(self) -> int:
        """Number of copies on other nodes; 0 if the tier is off."""
        return self.copies if self.every_steps else 0


class KeepBestSpec(Section):
    """How the best checkpoints are chosen: by a metric of the step."""

    metric: Literal["loss", "grad_norm"] = "loss"
    mode: Literal["min", "max"] = "min"
    n: Positive = Field(default=1, description="Number of best checkpoints that are kept.")


class RemoteTierSpec(Section):
    uri: Reference | None = Field(
        default=None,
        description="Location of the remote tier: a path, file:///path or s3://bucket/prefix. "
        "null: in the server's store.",
    )
    endpoint: Reference | None = Field(
        default=None,
        description="URL of the S3 service, which needs `secret`. null: AWS_ENDPOINT_URL, or AWS.",
    )
    region: Reference | None = Field(
        default=None, description="Region of the bucket. null: AWS_DEFAULT_REGION."
    )
    secret: Reference | None = Field(
        default=None,
        description="Name of the server's secret with the credentials for this bucket and "
        "endpoint. null: the variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ... in the "
        "environment of the server and of all nodes.",
    )
    every_steps: Every = Field(
        default=100,
        description="Steps between two saves to the remote tier. 0: only the last step is saved. "
        "auto: Holdfast measures the best interval.",
    )
    keep: Positive = Field(default=3, description="Number of newest checkpoints that are kept.")
    keep_every: Positive | None = Field(
        default=None,
        description="Checkpoints whose step is a multiple of this number are kept for good.",
    )
    keep_best: KeepBestSpec | None = Field(
        default=None, description="The best checkpoints by a metric are kept in addition."
    )


class CheckpointSpec(Section):
    memory: MemoryTierSpec = MemoryTierSpec()
    remote: RemoteTierSpec = RemoteTierSpec()
    final_save_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="Seconds that the last state of a cancelled or paused job may take to reach "
        "the remote tier. 0: no final save; the newest checkpoint there is used. A program has "
        "at least twice `program.grace_s` and 10 s.",
    )
    overhead_target: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.01,
        description="Fraction of the training time that a tier with `every_steps: auto` may cost.",
    )
    digest_every_steps: NonNegative = Field(
        default=1,
        description="Steps between two digests of the whole state, which prove that a recovered "
        "run equals an undisturbed one (P2). 0: no digests.",
    )

    @property
    def first_intervals(self) -> tuple[int, int]:
        """Steps between two saves to memory, and to the remote tier, when training starts."""
        memory, remote = self.memory.every_steps, self.remote.every_steps
        return (
            FIRST_MEMORY_STEPS if memory == "auto" else memory,
            FIRST_REMOTE_STEPS if remote == "auto" else remote,
        )


class DetectionSpec(Section):
    """When a rank without a sign of life is suspected to hang. Limits are learned from the job's
    own history (`progress/hang_limits.py`); a value set in `limits` replaces the learned limit."""

    enabled: bool = Field(
        default=True,
        description="Whether hangs are detected. false: only `stall_limit_s` and "
        "`collective_timeout_s` end a hang.",
    )
    hang_floor_s: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Lower bound of every learned limit, in seconds."
    )
    hang_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0,
        description="A learned limit is this factor times the 99.9th percentile of the observed "
        "standstills.",
    )
    first_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0, description="Limit of a phase without any history, in seconds."
    )
    limits: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="Limits in seconds by phase (`forward`, `load`, ...), instead of learned ones.",
    )
    stall_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="A running job without a new step for this many seconds (or for the limit of "
        "a phase, if that is longer) forms a new attempt, even if no rank is at fault.",
    )
    replace_stragglers: bool = Field(
        default=True,
        description="Replace a node on which a rank computes more slowly than its peers, if "
        "another node is ready.",
    )
    straggler_patience_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="Seconds that a rank must be slow before its node is replaced."
    )
    collective_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="Seconds after which a collective fails by itself, as a last resort.",
    )


class NonfiniteGuardSpec(Section):
    policy: Literal["skip", "rollback", "stop"] = Field(
        default="skip",
        description="Action after a step whose loss or gradient is not finite. Such a step is "
        "never applied.",
    )


class SpikeGuardSpec(Section):
    policy: Literal["off", "report", "skip", "rollback", "stop"] = "report"
    z: Annotated[float, Field(gt=0)] = Field(
        default=12.0,
        description="A value is a spike if it is more than this many deviations above the median "
        "of the preceding steps.",
    )


class GuardsSpec(Section):
    """The action after a step whose loss or gradient norm is out of bounds."""

    nonfinite: NonfiniteGuardSpec = NonfiniteGuardSpec()
    loss_spike: SpikeGuardSpec = SpikeGuardSpec()
    grad_norm_spike: SpikeGuardSpec = SpikeGuardSpec()
    window: Annotated[int, Field(ge=16, le=HISTORY_STEPS)] = Field(
        default=64, description="Number of preceding steps that a value is compared with."
    )
    warmup_steps: NonNegative = Field(
        default=100, description="Number of first steps in which no value counts as a spike."
    )
    rollback_steps: Positive = Field(
        default=2,
        description="Number of steps that a rollback goes back. Memory holds the last two steps.",
    )
    max_skips: NonNegative = Field(
        default=8,
        description="Number of data windows that may be skipped among the last `skip_span`.",
    )
    skip_span: Positive = 100


class ChecksSpec(Section):
    replica_digest_every_steps: NonNegative = Field(
        default=1,
        description="Largest number of steps between two comparisons of the replicas along "
        "`dp_replicate`. 0: no comparison. After a flipped bit, the steps since the last good "
        "comparison are discarded: with 1 these are one or two steps, which memory holds.",
    )


class ProgramSpec(Section):
    """How a program of the user runs: a `script`, a `command`, or a Ray Train function."""

    context: bool = Field(
        default=False,
        description="Whether a script trains in the steps of `holdfast.attach().context`, as a "
        "`function` does: the ranks that survive a fault continue in place, with the same bits. "
        "Each attempt runs the script again from its first line, in the same process. `train`, "
        "`checkpoint` and `guards` count as for a function; of `program`, only `preload` does.",
    )
    preload: tuple[Annotated[str, Field(max_length=200)], ...] = Field(
        default=(),
        max_length=64,
        description="Modules that are imported before a script starts, in the process that every "
        "rank is forked from: a restarted rank does not import them again. `torch` always is. A "
        "module that starts threads or touches devices when it is imported must not be here.",
    )
    fork: bool = Field(
        default=True,
        description="Whether ranks of a script are forked from a process that has imported the "
        "modules. false: each starts a new Python interpreter, as a command does.",
    )
    grace_s: Annotated[float, Field(ge=0, le=120)] = Field(
        default=30.0,
        description="Seconds between SIGTERM and SIGKILL when the program is asked to end. One "
        "that attaches gets as long before SIGTERM.",
    )
    steps: Positive | None = Field(
        default=None, description="Number of steps that the program takes, if known, for displays."
    )
    silence_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="A rank that prints nothing and computes nothing for this long is inspected, "
        "and restarted if no rank has made progress. It counts until the program reports steps: "
        "then the limits of `detection` do.",
    )
    step_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=120.0,
        description="A rank that reports steps, and then none for this long (or for 5 times its "
        "longest step, if that is longer), is inspected.",
    )
    metrics: Annotated[str, Field(max_length=1000)] | None = Field(
        default=None,
        description="A regular expression that is searched in each line that rank 0 prints. Its "
        "named groups are metrics: `step`, `loss`, `grad_norm`, `lr`, `tokens` (since the line "
        "before) and names of your own, such as `step (?P<step>[0-9]+) loss (?P<loss>[-+.e0-9]+)`.",
    )
    event_files: Annotated[str, Field(max_length=1000)] | None = Field(
        default=None,
        description="Folder in which rank 0 writes TensorBoard event files, whose scalars become "
        "metrics; relative to the code folder.",
    )

    @property
    def leave_s(self) -> float:
        """How long ranks that are asked to end may take: `grace_s` before SIGTERM, as long again
        before SIGKILL, and the way to the agents and back."""
        return 2 * self.grace_s + 10.0


class RayRunSpec(Section):
    """Of a Ray Train function: what `RunConfig`, `CheckpointConfig` and `TorchConfig` of a
    `TorchTrainer` say."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = Field(
        default=None,
        description="Name of the run's folder in `storage_path`. A run goes on from the newest "
        "checkpoint of its folder, also of an earlier job. null: the job's id.",
    )
    storage_path: Reference | None = Field(
        default=None,
        description="Folder of the run's reported checkpoints, which all nodes share. null: "
        "~/ray_results, as in Ray Train.",
    )
    num_to_keep: Positive | None = Field(
        default=None, description="Number of checkpoints that are kept. null: all."
    )
    score_attribute: Annotated[str, Field(max_length=200)] | None = Field(
        default=None,
        description="The metric by which the best checkpoints are chosen; the newest is always "
        "kept. null: the newest are kept.",
    )
    score_order: Literal["max", "min"] = "max"
    backend: Annotated[str, Field(max_length=100)] | None = Field(
        default=None,
        description="Backend of the process group. null: nccl with GPUs, else gloo.",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0, description="Seconds after which a collective fails by itself."
    )
    datasets: Reference | None = Field(
        default=None,
        description="`package.module:function` of a function without arguments that returns the "
        "Ray datasets of the run by name; `get_dataset_shard` gives each rank its shard. The ranks "
        "then are clients of the Ray cluster, which the server must allow "
        "(`HOLDFAST_RANKS_MAY_USE_RAY`).",
    )
    free_cpus_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0,
        description="Seconds for which a run with `datasets` waits for a CPU that no job has "
        "reserved: Ray reads the data with it.",
    )


PROGRAM_FIELDS = ("script", "command", "ray_train")
"""The fields of which one names the program of a job that brings one."""


class TrainingSpec(Section):
    """One training run: of a recipe (a built-in name or `package.module:attribute`), of a user's
    function, which has its own model and data, or of a user's program, which has its own loop."""

    recipe: Reference = "pretrain"
    function: Reference | None = Field(
        default=None,
        description="`package.module:attribute` of a training function that is called with a "
        "context, instead of a recipe. Holdfast then ignores `model`, `data`, `train.optimizer` "
        "and `train.schedule`.",
    )
    script: Reference | None = Field(
        default=None,
        description="A Python script and its arguments, such as `train.py --lr 3e-4`, run as it is "
        "on every rank, with the environment that torchrun sets. `-m package.module` runs a "
        "module.",
    )
    command: Reference | None = Field(
        default=None,
        description="A command line, run as it is on every rank without a shell, with the "
        "environment that torchrun sets.",
    )
    ray_train: Reference | None = Field(
        default=None,
        description="`package.module:attribute` of a Ray Train function (train_loop_per_worker), "
        "called with `config` as it is.",
    )
    ray_run: RayRunSpec = RayRunSpec()
    program: ProgramSpec = ProgramSpec()
    config: dict[str, Any] = Field(
        default={},
        description="The function's own settings, available as `ctx.config`; the configuration "
        "with which a Ray Train function is called.",
    )
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    train: TrainSpec = TrainSpec()
    parallel: ParallelSpec = ParallelSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    detection: DetectionSpec = DetectionSpec()
    guards: GuardsSpec = GuardsSpec()
    checks: ChecksSpec = ChecksSpec()

    @property
    def brings_program(self) -> bool:
        """Whether the ranks run a program of the user, which has its own loop."""
        return not self.program.context and any(
            getattr(self, name) is not None for name in PROGRAM_FIELDS
        )

    @property
    def function_name(self) -> str | None:
        """The user's code that trains in the steps of a context: the function, or the file or
        module of a script. None: a recipe, or a program."""
        if self.function is not None or self.script is None or not self.program.context:
            return self.function
        first, _, rest = self.script.strip().partition(" ")
        return rest.split()[0] if first == "-m" and rest else first

    @property
    def stop_s(self) -> float:
        """How long a pause or cancel waits for the last save: a program gets at least the time that
        its ranks may take to end."""
        saving = self.checkpoint.final_save_s
        return max(saving, self.program.leave_s) if self.brings_program else saving

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Modules that are imported before a program starts."""
        of_plugin = ("holdfast.integrations.ray_train.rank_process",) if self.ray_train else ()
        return (*of_plugin, *self.program.preload)

    @property
    def has_own_model(self) -> bool:
        """Whether the model is a user's: sections about the built-in models then mean nothing."""
        return self.function_name is not None or self.brings_program


class SpecFault(BaseModel):
    """One fault of a spec: its path in the spec, and a message that says how to fix it."""

    model_config = ConfigDict(frozen=True)

    path: str
    message: str


def find_faults(spec: TrainingSpec) -> list[SpecFault]:
    """Every fault that follows from the training spec alone, in the order of the spec."""
    if spec.brings_program:
        return [*_program_mesh_faults(spec.parallel)]
    faults: list[SpecFault] = [] if spec.function_name is not None else _model_faults(spec)
    train, parallel = spec.train, spec.parallel

    def add(path: str, message: str) -> None:
        faults.append(SpecFault(path=path, message=message))

    if spec.function_name is not None and parallel.cp > 1:
        add("parallel.cp", f"cp {parallel.cp} divides sequences of the built-in model only: use 1")
    if spec.function_name is not None and parallel.pp > 1:
        add("parallel.pp", f"pp {parallel.pp} divides layers of the built-in models only: use 1")
    if train.global_batch % train.micro_batch:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} is not a multiple of micro_batch "
            f"{train.micro_batch}",
        )
    elif train.global_batch < train.micro_batch * parallel.data_parallel:
        add(
            "train.global_batch",
            f"global_batch {train.global_batch} has less than one micro_batch of "
            f"{train.micro_batch} for each of dp_replicate × dp_shard = {parallel.dp_replicate} × "
            f"{parallel.dp_shard} = {parallel.data_parallel} ranks",
        )
    if spec.function_name is None and train.schedule.warmup_steps > train.steps:
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


def _pipeline_faults(spec: TrainingSpec) -> list[SpecFault]:
    """The faults of the built-in model's division into stages."""
    faults: list[SpecFault] = []
    model, parallel, train = spec.model, spec.parallel, spec.train
    if parallel.pp == 1:
        return faults

    def add(path: str, message: str) -> None:
        faults.append(SpecFault(path=path, message=message))

    schedule, stages = parallel.schedule, parallel.stages_on_a_rank
    count = parallel.pp * stages
    if model.layers < count:
        most = model.layers // stages
        nearest = f"use {most} at most" if most else f"layers must be {count} or more"
        add(
            "parallel.pp",
            f"{model.layers} layers cannot be divided among pp {parallel.pp} × {stages} stages per "
            f"rank = {count} stages: {nearest}",
        )
    needed = {"gpipe": "1", "1f1b": "1", "interleaved": "2 or more", "zero_bubble": "2"}[schedule]
    if stages != (stages if needed == "2 or more" and stages > 1 else int(needed[0])):
        add(
            "parallel.stages_per_rank",
            f"schedule {schedule} has {needed} stages per rank, not {stages}",
        )
    passes = -(-train.global_batch // (train.micro_batch * parallel.data_parallel))
    if why := parallel.why_no_schedule(passes):
        add("parallel.schedule", why)
    if parallel.zero in (2, 3):
        add(
            "parallel.zero",
            f"a pipeline keeps parameters and gradients whole during a step: use zero 1, not "
            f"{parallel.zero}",
        )
    if schedule == "zero_bubble":
        for path, is_set in (
            ("model.tied_embeddings", model.tied_embeddings),
            ("model.compile", model.compile),
            ("model.activation_checkpointing", model.activation_checkpointing != "none"),
        ):
            if is_set:
                name = path.removeprefix("model.")
                add(path, f"{name} cannot be combined with schedule zero_bubble: use 1f1b")
    return faults


def _model_faults(spec: TrainingSpec) -> list[SpecFault]:
    """The faults of the built-in model and of its sharding."""
    faults: list[SpecFault] = []
    model, parallel = spec.model, spec.parallel
    kv_heads = model.kv_heads or model.heads

    def add(path: str, message: str) -> None:
        faults.append(SpecFault(path=path, message=message))

    if model.dim % model.heads:
        add("model.heads", f"dim {model.dim} is not divisible by heads {model.heads}")
    elif model.family == "llama" and (model.dim // model.heads) % 2:
        add(
            "model.heads", f"head size {model.dim // model.heads} must be even for rotary positions"
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        add(
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor:g} must exceed low_freq_factor "
            f"{scaling.low_freq_factor:g}",
        )
    if model.heads % kv_heads:
        add("model.kv_heads", f"heads {model.heads} is not divisible by kv_heads {kv_heads}")
    if model.heads % parallel.tp:
        add("parallel.tp", f"heads {model.heads} is not divisible by tp {parallel.tp}")
    if model.family == "llama" and kv_heads % parallel.tp:
        add("parallel.tp", f"kv_heads {kv_heads} is not divisible by tp {parallel.tp}")
    if model.family == "llama" and model.sequence_length % parallel.tp:
        add(
            "parallel.tp",
            f"sequence_length {model.sequence_length} is not divisible by tp {parallel.tp}",
        )
    faults += _pipeline_faults(spec)
    if parallel.sequence_parallel and model.compile:
        add("parallel.sequence_parallel", "sequence_parallel cannot be combined with compile")
    vocabulary = VOCABULARIES[spec.data.tokenizer]
    if parallel.vocabulary_parallel and vocabulary % parallel.tp:
        add(
            "parallel.vocabulary_parallel",
            f"the vocabulary of {vocabulary} is not divisible by tp {parallel.tp}",
        )
    if model.ffn_dim is not None and model.ffn_dim % parallel.tp:
        add("parallel.tp", f"ffn_dim {model.ffn_dim} is not divisible by tp {parallel.tp}")
    if parallel.cp > 1:
        faults += [SpecFault(path="parallel.cp", message=m) for m in _why_not_cp(model, parallel)]
    return [*faults, *(_llama_faults(model) if model.family == "llama" else _vit_faults(spec))]


MOST_PIXELS = 4096
"""Of an image's side."""
MOST_CLASSES = 1 << 16
_OF_VIT = ("image_size", "patch_size", "classes")
_NOT_OF_VIT = (
    *("model.kv_heads", "model.sequence_length", "model.rope_theta", "model.rope_scaling"),
    *("model.tied_embeddings", "parallel.vocabulary_parallel", "parallel.cp"),
)


def _llama_faults(model: ModelSpec) -> Iterator[SpecFault]:
    for name in _OF_VIT:
        if getattr(model, name) is not None:
            message = f"{name} is for models of the family vit: remove it"
            yield SpecFault(path=f"model.{name}", message=message)


def _vit_faults(spec: TrainingSpec) -> Iterator[SpecFault]:
    model, parallel = spec.model, spec.parallel
    for path in _NOT_OF_VIT:
        # Not whether it is set: a resolved spec, with the defaults of all fields, is valid too.
        section, _, name = path.partition(".")
        values: Section = getattr(spec, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            message = f"a model of the family vit has no {name}: remove it"
            yield SpecFault(path=path, message=message)
    if spec.data.source == DataSpec().source:
        message = "a model of the family vit needs a folder with a subfolder of images per class"
        yield SpecFault(path="data.source", message=message)
    missing = [name for name in _OF_VIT if getattr(model, name) is None]
    for name in missing:
        message = f"a model of the family vit needs {name}: set it"
        yield SpecFault(path=f"model.{name}", message=message)
    if missing:
        return
    images = model.images
    for name, size, most in (
        ("image_size", images.image_size, MOST_PIXELS),
        ("classes", images.classes, MOST_CLASSES),
    ):
        if size > most:
            message = f"{name} {size} is too large: at most {most} can be stored"
            yield SpecFault(path=f"model.{name}", message=message)
    if images.classes < 2:
        message = "classes is 1: there is nothing to learn, set at least 2"
        yield SpecFault(path="model.classes", message=message)
    if images.image_size % images.patch_size:
        message = (
            f"image_size {images.image_size} is not divisible by patch_size {images.patch_size}"
        )
        yield SpecFault(path="model.patch_size", message=message)
    elif parallel.sequence_parallel and model.positions % parallel.tp:
        message = (
            f"sequence_parallel divides the {model.positions} patches of an image: their number "
            f"is not divisible by tp {parallel.tp}"
        )
        yield SpecFault(path="parallel.sequence_parallel", message=message)


def _why_not_cp(model: ModelSpec, parallel: ParallelSpec) -> list[str]:
    """Why the ranks of `cp` cannot divide the sequences of the model."""
    found = []
    cp, length, heads = parallel.cp, model.sequence_length, model.kv_heads or model.heads
    by_heads = parallel.context_method == "ulysses"
    factors = [] if by_heads else [("2", 2)]
    if parallel.sequence_parallel and parallel.tp > 1:
        factors.append((f"tp {parallel.tp}", parallel.tp))
    others = math.prod(size for _, size in factors)
    parts, of_rank = others * cp, heads // parallel.tp

    def is_legal(size: int) -> bool:
        return not length % (others * size) and not (by_heads and of_rank % size)

    nearest = _near(cp, is_legal, min(length, of_rank) if by_heads else length // others)
    if length % parts:
        product = " × ".join([*(name for name, _ in factors), f"cp {cp}"])
        total = f" = {parts}" if factors else ""
        unit = math.lcm(parts, parallel.tp)
        lengths = [n for n in (length // unit * unit, -(-length // unit) * unit) if n]
        found.append(
            f"sequence_length {length} is not divisible by {product}{total}: use a "
            f"sequence_length of {_either(lengths)}, or a cp of {_either(nearest)}"
        )
    if by_heads and not heads % parallel.tp and of_rank % cp:
        found.append(
            f"kv_heads {heads} / tp {parallel.tp} = {of_rank} is not divisible by cp {cp}, as "
            f"context_method ulysses needs: use a cp of {_either(nearest)}, or another method"
        )
    if model.compile:
        found.append(f"cp {cp} cannot be combined with compile: use a cp of 1, or compile: false")
    return found


def _near(size: int, is_legal: Callable[[int], bool], largest: int) -> list[int]:
    """The legal sizes next to `size`, of those that are not far from it; 1 is legal."""
    start, end = min(size - 1, largest), min(2 * size, size + NEAR_SIZES, largest)
    below = next((n for n in range(start, max(1, start - NEAR_SIZES), -1) if is_legal(n)), 1)
    above = next((n for n in range(size + 1, end + 1) if is_legal(n)), None)
    return [below] if above is None else [below, above]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
