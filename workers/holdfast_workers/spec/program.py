"""The sections `program` and `ray_run`: how a program of the user runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.spec.fields import Positive, Reference, Section


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
        description="Seconds between SIGTERM and SIGKILL when the program is asked to end, also "
        "for what it has started if it ends sooner. One that attaches gets as long before SIGTERM.",
    )
    steps: Positive | None = Field(
        default=None, description="Number of steps that the program takes, if known, for displays."
    )
    silence_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="A rank that prints nothing and computes nothing for this long is inspected, "
        "and restarted if no rank has made progress. It counts until the program reports steps: "
        "then the limits of `detection` do. While any rank has printed within this time, steps "
        "that are read from lines or event files may stay away.",
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
    """The run of a Ray Train function: the fields of `RunConfig`, `CheckpointConfig` and
    `TorchConfig` of a `TorchTrainer`."""

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
