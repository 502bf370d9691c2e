"""The sections `detection`, `guards` and `checks`: what counts as a hang, as a bad step, and as a
replica that differs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast_workers.spec.fields import NonNegative, Positive, Section

HISTORY_STEPS = 256
"""The number of steps whose loss and gradient norm the state stores for the guards."""


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
