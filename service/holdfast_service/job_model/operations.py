"""Operations: long work on request, as values. What they do is in the room `operations`."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class OperationKind(StrEnum):
    VERIFY = "verify"  # read every byte of a checkpoint
    EXPORT = "export"  # write a checkpoint's model to one file


class OperationState(StrEnum):
    PENDING = "PENDING"  # no server works on it yet, or its server ended
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self not in ACTIVE


ACTIVE = frozenset({OperationState.PENDING, OperationState.RUNNING})


class ParameterNames(StrEnum):
    """The names of the parameters in an exported file, and with them its form."""

    OWN = "own"  # one file of safetensors
    HUGGING_FACE = "hf"  # a tar file of a folder that `transformers` loads


class ExportedWeights(StrEnum):
    """Which of a checkpoint's weights are exported."""

    TRAINED = "trained"
    AVERAGE = "average"  # the moving average of `train.ema`


class ExportForm(NamedTuple):
    """What an export has."""

    names: ParameterNames = ParameterNames.OWN
    weights: ExportedWeights = ExportedWeights.TRAINED
