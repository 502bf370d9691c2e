"""Built-in training programs, their lookup by name, and what users' recipes import.

A recipe of a user imports what it needs from here (`docs/recipes.md`): these names stay, while the
modules that define them may move.
"""

from holdfast_workers.data.sample_order import micro_batch_positions, samples_at, samples_digest
from holdfast_workers.parallelize.mesh import data_index, data_parallel
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.state.rank_state import (
    RankBytes,
    RankState,
    ShardBox,
    Snapshot,
    StateMismatch,
    StateTensor,
    shard_box_of,
)
from holdfast_workers.training.guards import GuardAction, NonfiniteOrigin
from holdfast_workers.training.recipe import (
    Agree,
    AttemptSteps,
    Gate,
    GuardTripped,
    NonFiniteStep,
    PhaseReporter,
    Recipe,
    StepOutcome,
    World,
)
from holdfast_workers.training.step_agreement import Agreed, Contribution
from holdfast_workers.training.step_seeds import seed_generators

__all__ = [
    "Agree",
    "Agreed",
    "AttemptSteps",
    "Contribution",
    "Gate",
    "GuardAction",
    "GuardTripped",
    "NonFiniteStep",
    "NonfiniteOrigin",
    "PhaseReporter",
    "RankBytes",
    "RankState",
    "Recipe",
    "ShardBox",
    "Snapshot",
    "StateLayout",
    "StateMismatch",
    "StateTensor",
    "StepOutcome",
    "TrainingSpec",
    "World",
    "data_index",
    "data_parallel",
    "micro_batch_positions",
    "samples_at",
    "samples_digest",
    "seed_generators",
    "shard_box_of",
]
