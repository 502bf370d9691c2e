"""The section `evaluate`: when the model is evaluated on documents that no step is trained on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast_workers.spec.fields import NonNegative, Positive, Reference, Section

EvaluationMetric = Literal["eval_loss", "eval_perplexity"]
MOST_SAMPLES = 2**62
"""More than any data has."""


class EarlyStopSpec(Section):
    """When a job ends before its last step: its model has stopped improving."""

    metric: EvaluationMetric = "eval_loss"
    patience: Positive = Field(
        description="The job ends, saved and successful, once so many evaluations in a row were no "
        "better than the best one before them. Those at multiples of `every_steps` count."
    )


class EvaluateSpec(Section):
    every_steps: NonNegative = Field(
        default=0,
        description="Steps between two evaluations on the documents of `data.validation`; the last "
        "step is evaluated too. 0: no evaluation.",
    )
    batches: Positive | None = Field(
        default=None,
        description="Global batches of an evaluation: always the same samples, each once. null: "
        "all documents.",
    )
    weights: Literal["trained", "average"] = Field(
        default="trained", description="average: the moving averages of `train.ema`."
    )
    function: Reference | None = Field(
        default=None,
        description="`package.module:name` of a function that is called with the outputs and the "
        "targets of each micro-batch, and returns sums over these targets by name. `eval_NAME` of "
        "a step is the sum over all ranks, divided by the number of targets.",
    )
    stop: EarlyStopSpec | None = Field(
        default=None, description="Ends the job early. null: all steps are made."
    )

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether the state after `step` is evaluated."""
        return self.every_steps > 0 and (step % self.every_steps == 0 or step == last_step)

    def counts_for_stop(self, step: int) -> bool:
        """Whether the evaluation of `step` counts for `stop`: a job with more steps has it too."""
        return self.stop is not None and self.every_steps > 0 and step % self.every_steps == 0

    def most_samples(self, global_batch: int) -> int:
        """The most samples that an evaluation reads; 0 without one."""
        if not self.every_steps:
            return 0
        return MOST_SAMPLES if self.batches is None else self.batches * global_batch
