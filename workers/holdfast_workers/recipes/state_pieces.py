"""The state of a built-in recipe in pieces: parameters, moments, moving averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast_workers.optim.local_optimizer import Moment
from holdfast_workers.state.layout import AVERAGES_PREFIX
from holdfast_workers.state.rank_state import ShardBox, StateTensor


def state_pieces(
    parameters: Mapping[str, Tensor],
    boxes: Mapping[str, ShardBox],
    moments: Sequence[Moment],
    averages: Sequence[Tensor],
) -> list[StateTensor]:
    """The pieces, in the order of a payload. `parameters`: this rank's parts, by name; `averages`:
    in their order, or none."""
    pieces = [
        StateTensor(f"model.{name}", tensor, boxes[name], weight=True)
        for name, tensor in parameters.items()
    ]
    pieces += [
        StateTensor(
            f"optim.{moment.kind}.{moment.parameter.name}",
            moment.tensor,
            _box_of(moment, boxes[moment.parameter.name]),
            weight=False,
        )
        for moment in moments
    ]
    return pieces + [
        StateTensor(f"{AVERAGES_PREFIX}{name}", average, boxes[name], weight=False)
        for name, average in zip(parameters, averages, strict=False)
    ]


@torch.no_grad()
def restart_averages(averages: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Begin the averages, if there are any, with the present values."""
    if averages:
        torch._foreach_copy_(list(averages), list(tensors))


def _box_of(moment: Moment, box: ShardBox) -> ShardBox:
    """Of ranks whose boxes differ only in the dimension that the moment lacks, the first one is the
    primary."""
    reduced = moment.reduced
    if reduced is None:
        return box
    shape, offsets = list(box.global_shape), list(box.offsets)
    shape[reduced], offsets[reduced] = 1, 0
    is_first = box.offsets[reduced] == 0
    local = tuple(moment.tensor.shape)
    return ShardBox(tuple(shape), tuple(offsets), local, box.primary and is_first)
