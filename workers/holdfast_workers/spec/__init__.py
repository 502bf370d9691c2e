"""The specification of a training run: the part of a job spec that the data plane needs.

These immutable models are the single source of the sections `model`, `data`, `train`, `parallel`,
`checkpoint`, `detection` and `guards`. The service's job spec embeds them and adds the sections of
the control plane (name, resources, recovery). :func:`find_faults` finds the faults within a section
and between sections; the service finds those that depend on the cluster. All names are imported
from here; inside of the room, from the module of their section.
"""

from holdfast_workers.spec.amount import AMOUNTS, amount_text, with_steps
from holdfast_workers.spec.checkpoint import (
    FIRST_MEMORY_STEPS,
    FIRST_REMOTE_STEPS,
    CheckpointSpec,
    KeepBestSpec,
    MemoryTierSpec,
    RemoteTierSpec,
)
from holdfast_workers.spec.data_faults import OF_SOURCES
from holdfast_workers.spec.evaluate import EarlyStopSpec, EvaluateSpec, EvaluationMetric
from holdfast_workers.spec.faults import find_faults
from holdfast_workers.spec.fields import Every, NonNegative, Positive, Reference, Section
from holdfast_workers.spec.model import (
    OF_PUBLISHED,
    ActivationCheckpointing,
    ComputeDtype,
    Family,
    ImageSizes,
    ModelSpec,
    PublishedSpec,
    RopeScalingSpec,
    WeightDtype,
)
from holdfast_workers.spec.model_faults import MOST_CLASSES, MOST_PIXELS, NEAR_SIZES
from holdfast_workers.spec.optimization import (
    Decay,
    OptimizerName,
    OptimizerSpec,
    ParameterGroupSpec,
    ScheduleSpec,
)
from holdfast_workers.spec.parallel import MESH_AXES, ContextMethod, ParallelSpec, Schedule, Zero
from holdfast_workers.spec.program import ProgramSpec, RayRunSpec
from holdfast_workers.spec.resources import RankResources, TimeoutsSpec
from holdfast_workers.spec.safeguards import (
    HISTORY_STEPS,
    ChecksSpec,
    DetectionSpec,
    GuardsSpec,
    NonfiniteGuardSpec,
    SpikeGuardSpec,
)
from holdfast_workers.spec.spec_fault import OF_DEFAULT, SpecFault
from holdfast_workers.spec.train import (
    BYTE_VOCABULARY,
    BYTES,
    DataSpec,
    Determinism,
    PreparedSpec,
    SourceSpec,
    SpecialRole,
    SpecialTokenSpec,
    TrainSpec,
)
from holdfast_workers.spec.training import BUILT_IN_RECIPES, TrainingSpec

__all__ = [
    "AMOUNTS",
    "BUILT_IN_RECIPES",
    "BYTES",
    "BYTE_VOCABULARY",
    "FIRST_MEMORY_STEPS",
    "FIRST_REMOTE_STEPS",
    "HISTORY_STEPS",
    "MESH_AXES",
    "MOST_CLASSES",
    "MOST_PIXELS",
    "NEAR_SIZES",
    "OF_DEFAULT",
    "OF_PUBLISHED",
    "OF_SOURCES",
    "ActivationCheckpointing",
    "CheckpointSpec",
    "ChecksSpec",
    "ComputeDtype",
    "ContextMethod",
    "DataSpec",
    "Decay",
    "DetectionSpec",
    "Determinism",
    "EarlyStopSpec",
    "EvaluateSpec",
    "EvaluationMetric",
    "Every",
    "Family",
    "GuardsSpec",
    "ImageSizes",
    "KeepBestSpec",
    "MemoryTierSpec",
    "ModelSpec",
    "NonNegative",
    "NonfiniteGuardSpec",
    "OptimizerName",
    "OptimizerSpec",
    "ParallelSpec",
    "ParameterGroupSpec",
    "Positive",
    "PreparedSpec",
    "ProgramSpec",
    "PublishedSpec",
    "RankResources",
    "RayRunSpec",
    "Reference",
    "RemoteTierSpec",
    "RopeScalingSpec",
    "Schedule",
    "ScheduleSpec",
    "Section",
    "SourceSpec",
    "SpecFault",
    "SpecialRole",
    "SpecialTokenSpec",
    "SpikeGuardSpec",
    "TimeoutsSpec",
    "TrainSpec",
    "TrainingSpec",
    "WeightDtype",
    "Zero",
    "amount_text",
    "find_faults",
    "with_steps",
]
