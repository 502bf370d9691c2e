"""The forward passes of a model that is divided into stages, without gradients.

The micro-batches pass all stages one after the other, whatever the schedule of training is: a stage
of a micro-batch begins once the rank has passed on the one before, and a rank passes on nothing
more until that was received. What a rank waits for is always of an earlier place in this order, so
no two ranks wait for each other, also where a rank has several stages; with one stage each, the
ranks work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.models.transformer import Transformer
from holdfast_workers.parallelize.counted_transfers import counted, link_name
from holdfast_workers.parallelize.mesh import PIPELINE_AXIS
from holdfast_workers.parallelize.pipeline import own_stages
from holdfast_workers.parallelize.stage_split import stages_of
from holdfast_workers.spec import ParallelSpec


class ForwardStages:
    """This rank's part in the forward passes of one attempt."""

    def __init__(
        self, model: Transformer, parallel: ParallelSpec, mesh: DeviceMesh, hidden: Tensor
    ) -> None:
        """`hidden`: what a stage passes on of a micro-batch, on the meta device."""
        self._axis = mesh[PIPELINE_AXIS]
        self._stages = own_stages(model)
        self._hidden = hidden
        pp = self._axis.size()
        self._rank_of = {
            stage: coordinate
            for coordinate in range(pp)
            for stage in stages_of(parallel, pp, coordinate)
        }

    def losses(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        begins: Callable[[int], None],
    ) -> list[Tensor]:
        """The loss of each micro-batch, on the rank of the last stage; none elsewhere. `begins` is
        called with the number of a micro-batch before each of its stages."""
        sent: list[tuple[dist.Work, Tensor]] = []  # one at most
        losses = []
        for number, (own, of) in enumerate(zip(inputs, targets, strict=True)):
            outputs = self._pass_on(number, own, begins, sent)
            if outputs is not None:
                losses.append(loss(outputs, of))
        _finish(sent)
        return losses

    def _pass_on(
        self,
        number: int,
        inputs: Tensor,
        begins: Callable[[int], None],
        sent: list[tuple[dist.Work, Tensor]],
    ) -> Tensor | None:
        """The outputs of the last stage, if this rank has it."""
        x: Tensor | None = None
        for stage in self._stages:
            begins(number)
            part = stage.part
            if part.is_first:
                x = inputs
            elif self._rank_of[part.index - 1] != self._axis.get_local_rank():
                x = self._received(part.index, inputs.device)
            assert x is not None
            x = stage(x)
            assert x is not None
            if part.is_last:
                return x
            if self._rank_of[part.index + 1] != self._axis.get_local_rank():
                _finish(sent)
                sent.append((self._send(x, part.index), x))  # which keeps its memory
        return None

    def _received(self, stage: int, device: torch.device) -> Tensor:
        x = torch.empty_like(self._hidden, device=device, requires_grad=False)
        self._begun(dist.irecv, x, self._rank_of[stage - 1]).wait()
        return x

    def _send(self, x: Tensor, stage: int) -> dist.Work:
        return self._begun(dist.isend, x.contiguous(), self._rank_of[stage + 1])

    def _begun(self, start: Callable[..., object], x: Tensor, peer: int) -> dist.Work:
        me = self._axis.get_local_rank()
        ends = (me, peer) if start is dist.isend else (peer, me)
        op = dist.P2POp(start, x, group=self._axis.get_group(), group_peer=peer)
        (work,) = dist.batch_isend_irecv([counted(op, link_name(PIPELINE_AXIS, *ends))])
        return work


def _finish(sent: list[tuple[dist.Work, Tensor]]) -> None:
    """Wait until what was sent has been received."""
    for work, _ in sent:
        work.wait()
    sent.clear()
