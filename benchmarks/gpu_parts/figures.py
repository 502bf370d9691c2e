"""The figures of `benchmarks.gpu` and what its parts are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """`device` is "cpu" or "cuda:0"; `small` sizes take seconds on a processor; `folder` is for
    files of this run, `memory` for memory checkpoints."""

    device: str
    small: bool
    folder: Path
    memory: Path

    @property
    def on_device(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class TrainingFigures:
    """The training core alone, after its warm-up. `peak_source`: `table` (data sheet, by the
    device's name) or `measured` (the matrix product's rate, `matmul_tflops`); `mfu` is the share of
    that peak, by the formula of `holdfast_workers.training.mfu`."""

    parameters: int
    dtype: str
    compiled: bool
    tokens_per_step: int
    step_s: float
    tokens_per_s: float
    mfu: float
    peak_tflops: float
    peak_source: str
    matmul_tflops: float
    first_step_s: float
    """With compilation."""
    loss_first: float
    loss_last: float
    memory_bytes: int


@dataclass(frozen=True)
class ForkFigures:
    """Processes forked by the product's zygote that compute on the device: they could not if the
    zygote had a context of its own."""

    zygote_start_s: float
    fork_s: float
    checked_s: float
    """From the request to the answer: context, known products, speed of memory."""
    zygote_loaded_driver: bool
    zygote_device_files: int
    """Files of devices that it holds open; NVML may hold some."""
    memory_gb_per_s: dict[str, float]


@dataclass(frozen=True)
class KillFigures:
    """SIGKILL of the only rank, whose agent forks it anew from memory. Medians, in seconds from the
    kill."""

    faults: int
    detected_s: float
    formed_s: float
    """Until the new worker holds the state."""
    first_step_s: float
    steps_lost: int
    """In all faults together: applied, and not in memory yet."""
    state_bytes: int


@dataclass(frozen=True)
class CommunicatorFigures:
    """A world of one rank with two groups: its communicators are aborted and formed again."""

    backend: str
    aborted: int
    """Communicators that an abort ended."""
    form_s: float
    abort_s: float
    reform_s: float


@dataclass(frozen=True)
class StagingFigures:
    """A state that is staged to the host and digested beside training; per save."""

    state_bytes: int
    step_s: float
    """Without saves."""
    stall_s: float
    """Training's own wait to start a save."""
    staged_s: float
    """Until the state may change again; 0 where it needs no staging."""
    digested_s: float
    """Until copy and digest are complete."""
    added_s: float
    """Time that a save adds to training's."""
    staged_gb_per_s: float
    digested_gb_per_s: float


@dataclass(frozen=True)
class ProbeFigures:
    """NVML on the real devices: the readings that each device gave, and did not give."""

    devices: int
    measured: list[str]
    not_measured: list[str]
    xids: int
    read_s: float


@dataclass(frozen=True)
class CurveFigures:
    """Losses of the same steps on the processor and on the device, in float32."""

    steps: int
    greatest_difference: float
    """Relative to the loss."""
    tolerance: float
    loss_last: float


@dataclass(frozen=True)
class GpuResult:
    """The last line of `benchmarks.gpu`. A part that failed has its error instead of figures; one
    without a meaning on this device is named in `left_out`, with the reason."""

    device: str
    device_name: str
    versions: dict[str, str]
    training: TrainingFigures | None = None
    training_fast: TrainingFigures | None = None
    """With `train.deterministic: fast`."""
    fork: ForkFigures | None = None
    kill: KillFigures | None = None
    communicator: CommunicatorFigures | None = None
    staging: StagingFigures | None = None
    nvml: ProbeFigures | None = None
    curves: CurveFigures | None = None
    errors: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
