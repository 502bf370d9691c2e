"""Loads a job's first state: that of its seed or with published weights, or the checkpoint that
`init_from` names.

From another run's checkpoint, either everything is loaded, and this run continues from that step,
or only the model's weights, and everything else is as at step 0. The meshes may differ. The names
of the weights must be the same on both sides: nothing is left out or chosen by likeness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast_workers.checkpoint.manifest import CheckpointError
from holdfast_workers.parallelize.mesh import PIPELINE_AXIS
from holdfast_workers.protocol.messages import DCP_URI_PREFIX, InitPart, Restore
from holdfast_workers.published.weight_set import BadWeightSet
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import StateLayout
from holdfast_workers.training.recipe import make_room
from holdfast_workers.worker.remote_loading import LoadBuffer, load_with_room

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe


class CannotBegin(Exception):
    """The checkpoint of `init_from`, or the folder of published weights, is damaged or of another
    model; the user must change it."""


def load_initial_state(
    recipe: Recipe,
    restore: Restore,
    load: Callable[[LoadBuffer, StateLayout], None],
    initialize: Callable[[], None] | None = None,
) -> None:
    """Load the state that the order's `restore` names. Raises CannotBegin, StorageError.

    `load` fills a buffer from `restore.uri`; `initialize` loads the state of step 0 if there is
    none, by default that of the seed.
    """
    uri = restore.uri
    if not uri:
        try:
            (initialize or recipe.initialize)()
        except BadWeightSet as error:
            raise CannotBegin(str(error)) from error
        return
    recipe.initialize()  # for the parts that the checkpoint lacks or that are not requested
    whole = recipe.layout()
    is_stock = uri.startswith(DCP_URI_PREFIX)
    buffer = LoadBuffer(uri.removeprefix(DCP_URI_PREFIX), whole.payload_bytes)
    payload = buffer.payload
    recipe.write_state(payload, restore.step)
    wanted = _part(whole, restore)
    try:
        if is_stock:
            # Late import: only such a checkpoint needs stock torch's reader.
            from holdfast_workers.checkpoint.stock_reading import load_stock_model

            load_stock_model(uri.removeprefix(DCP_URI_PREFIX), wanted, payload)
        else:
            payload, whole = load_with_room(load, buffer, wanted, uri)
            make_room(recipe, whole)
    except CheckpointError as error:
        raise CannotBegin(str(error)) from error
    recipe.read_state(payload)


def knows_all_weights(spec: TrainingSpec, mesh: Mapping[str, int]) -> bool:
    """Whether each rank's layout names all weights, so that a rank can tell which ones of
    a checkpoint its job lacks. A function registers the same modules on all ranks, and so does a
    model of a library; the ranks of a recipe may differ (the service compares the built-in models),
    and those of a pipeline do."""
    is_library = spec.model.family == "transformers"
    return (spec.function_name is not None or is_library) and mesh.get(PIPELINE_AXIS, 1) == 1


def _part(whole: StateLayout, restore: Restore) -> StateLayout:
    if restore.what is InitPart.EVERYTHING:
        return whole
    weights = tuple(entry for entry in whole.tensors if entry.weight)
    if not weights:
        raise CannotBegin(
            f"the model of {restore.uri} cannot be loaded: nothing in this job's state is a weight "
            "of a model. Register the module, or in a recipe pass weight=True to its StateTensors"
        )
    return StateLayout(weights, whole.payload_bytes)
