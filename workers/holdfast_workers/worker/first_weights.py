"""Begins a job with published weights: at step 0, and only if no checkpoint is loaded.

The manifest comes from the job's store, the weights from the folder that the spec names, which this
node must be able to read. Afterwards nothing of a run needs either: a checkpoint has the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast_workers.checkpoint.storage import StorageError, joined
from holdfast_workers.published.folder import difference
from holdfast_workers.published.model_config import UnfitConfig
from holdfast_workers.published.weight_reader import (
    PathUnavailable,
    WeightReader,
    WeightsUnavailable,
)
from holdfast_workers.published.weight_set import MANIFEST, BadWeightSet, WeightSet
from holdfast_workers.spec import ModelSpec, PublishedSpec, TrainingSpec

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

_RETRY_S = 0.5


@runtime_checkable
class TakesWeights(Protocol):
    """A recipe whose `initialize` takes the parameters from here, unless it is None."""

    published_weights: WeightReader | None


def published_weights_of(spec: TrainingSpec) -> PublishedSpec | None:
    """The weights that the job begins with; None: they depend on its seed."""
    return None if spec.has_own_model else spec.model.published


def initialize_with_weights(
    recipe: Recipe,
    read_manifest: Callable[[], bytes],
    on_read: Callable[[], None] = lambda: None,
    patience_s: float = 0.0,
) -> None:
    """Load the state of step 0 with the published weights of the recipe's spec. `on_read` is called
    before every few megabytes, and in waits; what it raises ends them. If folder or manifest cannot
    be read now, it is tried again until `patience_s` have passed.

    Raises BadWeightSet, also if the folder is not there then, WeightsUnavailable, StorageError.
    """
    if not isinstance(recipe, TakesWeights):
        raise BadWeightSet(
            f"model.from is {recipe.spec.model.source}, and the recipe {recipe.spec.recipe} takes "
            "no published weights: use `pretrain`, or a recipe that has `published_weights`"
        )
    until = time.monotonic() + patience_s
    while True:
        try:
            recipe.published_weights = _open(recipe.spec.model, read_manifest(), on_read)
            recipe.initialize()
            return
        except (WeightsUnavailable, StorageError) as error:
            if time.monotonic() >= until:
                if isinstance(error, PathUnavailable):
                    raise BadWeightSet(str(error)) from error
                raise
        finally:
            recipe.published_weights = None
        on_read()
        time.sleep(_RETRY_S)


def _open(model: ModelSpec, manifest: bytes, on_read: Callable[[], None]) -> WeightReader:
    """Raises BadWeightSet."""
    assert model.published is not None and model.source is not None
    where = joined(model.published.uri, MANIFEST)
    weights = WeightSet.decode(manifest, model.published.digest, where)
    _compare(model, weights, where)
    return WeightReader(Path(model.source), weights, on_read)


def _compare(model: ModelSpec, weights: WeightSet, where: str) -> None:
    """Raises BadWeightSet if the model is not that of the weights' configuration."""
    try:
        found = difference(model, weights.config)
    except UnfitConfig as error:
        raise BadWeightSet(f"{where}: {error}") from error
    if found is not None:
        raise BadWeightSet(f"{found}: submit the job without this field")
