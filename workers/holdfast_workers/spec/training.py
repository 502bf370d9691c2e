"""The whole training spec: one section each, and the fields that name what is trained."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from holdfast_workers.spec.checkpoint import CheckpointSpec
from holdfast_workers.spec.evaluate import EvaluateSpec
from holdfast_workers.spec.fields import CommandLine, Reference, Section
from holdfast_workers.spec.model import ModelSpec
from holdfast_workers.spec.parallel import ParallelSpec
from holdfast_workers.spec.program import ProgramSpec, RayRunSpec
from holdfast_workers.spec.safeguards import ChecksSpec, DetectionSpec, GuardsSpec
from holdfast_workers.spec.train import DataSpec, TrainSpec

BUILT_IN_RECIPES = {"pretrain": "holdfast_workers.recipes.pretrain:PretrainRecipe"}
"""The names that a spec's `recipe` may have, and their `module:class`; named here, so that checking
a spec does not import torch."""

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
    script: CommandLine | None = Field(
        default=None,
        description="A Python script and its arguments, such as `train.py --lr 3e-4` or a list of "
        "them, run as it is on every rank, with the environment that torchrun sets. "
        "`-m package.module` runs a module.",
    )
    command: CommandLine | None = Field(
        default=None,
        description="A command line, or a list of its words, run as it is on every rank without a "
        "shell, with the environment that torchrun sets.",
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
    evaluate: EvaluateSpec = EvaluateSpec()
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
    def vocabulary(self) -> int | None:
        """Number of tokens that a built-in language model knows; None: not known before the data
        and the model are prepared."""
        if not self.model.has_sizes:
            return None
        return self.model.vocabulary or self.data.vocabulary

    @property
    def function_name(self) -> str | None:
        """The user's code that trains in the steps of a context: the function, or the file or
        module of a script. None: a recipe, or a program."""
        if self.function is not None or not self.script or not self.program.context:
            return self.function
        return self.script[:2][-1] if self.script[0] == "-m" else self.script[0]

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
