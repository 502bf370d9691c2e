"""Loads a job's first state: the state of its seed, or the checkpoint that `init_from` names.

From another run's checkpoint, either everything is loaded, and this run continues from that step,
or only the model's parameters, and everything else is as at step 0. The meshes may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast_workers.checkpoint.manifest import CheckpointError
from holdfast_workers.protocol.messages import DCP_URI_PREFIX, InitPart, Restore
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout
from holdfast_workers.training.recipe import make_room
from holdfast_workers.worker.remote_loading import LoadBuffer, load_with_room

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe


class CannotBegin(Exception):
    """The checkpoint of `init_from` is damaged or of another model; the user must change it."""


def load_initial_state(
    recipe: Recipe, restore: Restore, load: Callable[[LoadBuffer, StateLayout], None]
) -> None:
    """Load the state that the order's `restore` names. Raises CannotBegin, StorageError.

    `load` fills a buffer from `restore.uri`.
    """
    recipe.initialize()  # also for the parts that the checkpoint lacks or that are not requested
    uri = restore.uri
    if not uri:
        return
    whole = recipe.layout()
    is_stock = uri.startswith(DCP_URI_PREFIX)
    buffer = LoadBuffer(uri.removeprefix(DCP_URI_PREFIX), whole.payload_bytes)
    payload = buffer.payload
    recipe.write_state(payload, restore.step)
    wanted = _part(whole, restore.what)
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


def _part(whole: StateLayout, what: InitPart) -> StateLayout:
    if what is InitPart.EVERYTHING:
        return whole
    model = tuple(entry for entry in whole.tensors if entry.name.startswith(MODEL_PREFIX))
    return StateLayout(model, whole.payload_bytes)
