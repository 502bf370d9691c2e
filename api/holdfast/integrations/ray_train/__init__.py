"""Ray Train under Holdfast: training functions as they are, and `TorchTrainer(...).fit()`.

A rank of a job with `ray_train:` runs `python -m holdfast.integrations.ray_train module:function`:
a process with torchrun's environment that serves the calls of `ray.train` itself. No worker, actor
or controller of Ray Train takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.integrations.ray_train.trainer import TorchTrainer

__all__ = ["TorchTrainer"]


def __getattr__(name: str) -> Any:
    if name != "TorchTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Late: a rank needs no client.
    from holdfast.integrations.ray_train.trainer import TorchTrainer

    return TorchTrainer
