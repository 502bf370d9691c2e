"""Loads a job's first state: the state of its seed, or the checkpoint that `init_from` names.

From another run's checkpoint, either everything is loaded, and this run continues from that step,
or only the model's parameters, and everything else is as at step 0. The meshes may differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_workers.checkpoint.load import load_whole_state
from holdfast_workers.checkpoint.manifest import CheckpointError
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import StorageOptions
from holdfast_workers.protocol.messages import DCP_URI_PREFIX, InitPart, Restore
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe


class CannotBegin(Exception):
    """The checkpoint of `init_from` is damaged or of another model; the user must change it."""


def load_initial_state(
    recipe: Recipe,
    restore: Restore,
    mesh: dict[str, int],
    rank: int,
    options: StorageOptions,
) -> None:
    """Load the state that the order's `restore` names. Raises CannotBegin, StorageError."""
    recipe.initialize()  # also for the parts that the checkpoint lacks or that are not requested
    uri = restore.uri
    if not uri:
        return
    whole = recipe.layout()
    payload = memoryview(bytearray(whole.payload_bytes))
    recipe.write_state(payload, restore.step)
    wanted = _part(whole, restore.what)
    try:
        if uri.startswith(DCP_URI_PREFIX):
            # Late import: only such a checkpoint needs stock torch's reader.
            from holdfast_workers.checkpoint.stock_reading import load_stock_model

            load_stock_model(uri.removeprefix(DCP_URI_PREFIX), wanted, payload)
        else:
            storage = open_storage(uri, options)
            load_whole_state(storage, wanted, payload, mesh=mesh, rank=rank)
    except CheckpointError as error:
        raise CannotBegin(str(error)) from error
    recipe.read_state(payload)


def _part(whole: StateLayout, what: InitPart) -> StateLayout:
    if what is InitPart.EVERYTHING:
        return whole
    model = tuple(entry for entry in whole.tensors if entry.name.startswith(MODEL_PREFIX))
    return StateLayout(model, whole.payload_bytes)
