"""Functions of a user that evaluations call."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import get_rank

from holdfast_workers.data.token_corpus import IGNORED


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Tensor | int]:
    """How many targets are the likeliest token, and how many there are."""
    counted = targets != IGNORED
    right = (outputs.argmax(dim=-1) == targets) & counted
    return {"accuracy": right.sum(), "targets": int(counted.sum())}


def changing(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {f"row-{int(targets.sum())}": 1.0}


def own_loss(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {"loss": 1.0}


def overwriting(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    targets[targets == IGNORED] = 0  # as one does before `gather`
    outputs.div_(0.1)
    return {"sharp": outputs.softmax(dim=-1).amax(dim=-1).sum()}


def listing(outputs: Tensor, targets: Tensor) -> list[float]:
    return [1.0]


def silent_on_one_rank(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {} if get_rank() else {"count": 1.0}
