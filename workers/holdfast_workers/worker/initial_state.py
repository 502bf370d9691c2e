"""How a job begins: with the state of its seed, or with one that its spec names (`init_from`).

Of another run either everything is taken, and this one goes on where that one stood, or its
model's parameters alone, and all else is as at step 0. The mesh may be another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast_workers.checkpoint.load import load_whole_state
from holdfast_workers.checkpoint.manifest import CheckpointError
from holdfast_workers.checkpoint.storage import StorageOptions, open_storage
from holdfast_workers.protocol.messages import STOCK_URI, InitPart
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe


class CannotBegin(Exception):
    """What `init_from` names is damaged or of another model: only the job's user can help."""


def begin(
    recipe: Recipe,
    restore: Mapping[str, Any],
    mesh: dict[str, int],
    rank: int,
    options: StorageOptions,
) -> None:
    """Put in the state of the order's `restore`. Raises CannotBegin, StorageError."""
    recipe.initialize()  # also what the other run's checkpoint does not hold, or is not asked for
    uri = str(restore["uri"])
    if not uri:
        return
    whole = recipe.layout()
    payload = memoryview(bytearray(whole.payload_bytes))
    recipe.write_state(payload, int(restore["step"]))
    wanted = _part(whole, InitPart(restore["what"]))
    try:
        if uri.startswith(STOCK_URI):
            # Late: only who begins with such a checkpoint pays for stock torch's reader.
            from holdfast_workers.checkpoint.stock_reading import load_stock_model

            load_stock_model(uri.removeprefix(STOCK_URI), wanted, payload)
        else:
            at = open_storage(uri, options)
            load_whole_state(at, wanted, payload, mesh=mesh, rank=rank)
    except CheckpointError as error:
        raise CannotBegin(str(error)) from error
    recipe.read_state(payload)


def _part(whole: StateLayout, what: InitPart) -> StateLayout:
    if what is InitPart.EVERYTHING:
        return whole
    model = tuple(one for one in whole.tensors if one.name.startswith(MODEL_PREFIX))
    return StateLayout(model, whole.payload_bytes)
