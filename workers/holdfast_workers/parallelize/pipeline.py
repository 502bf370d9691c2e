"""Pipeline parallelism: the stages of a rank, and a step's micro-batches through all stages.

The model of a rank keeps only its stages' parameters, under their names in the whole model. Orders
of micro-batches, and the exchange between stages, are those of `torch.distributed.pipelining`. Its
stage and schedule objects hold process groups and the state of an interrupted step, so they are
made anew in every attempt, around the modules that live on. Shapes are given, so that no stage asks
another for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from holdfast_workers.models.transformer import Transformer
from holdfast_workers.parallelize.counted_transfers import counted, link_name
from holdfast_workers.parallelize.mesh import PIPELINE_AXIS
from holdfast_workers.parallelize.stage_split import StagePart
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.rank_state import local_of

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleZBVZeroBubble}
Shape = tuple[int, ...]
_SCHEDULE_LOG = "torch.distributed.pipelining.schedules"


class ChunkReporter(Protocol):
    """Reports that a pass of a stage begins."""

    def __call__(self, name: str, micro_batch: int, stage: int) -> None:
        """`name`: "forward" or "backward"."""
        ...


class StageModule(nn.Module):
    """The part of a model that a stage computes, on modules that stay the model's own."""

    def __init__(self, model: Transformer, part: StagePart, tied: bool) -> None:
        super().__init__()
        self.part = part
        self.blocks = nn.ModuleDict({name: model.blocks[name] for name in part.block_names})
        # Registered, so that FSDP manages their parameters with the stage's.
        self.ends = nn.ModuleList(
            module
            for name in _ends(model, part, tied)
            if (module := getattr(model, name)) is not None
        )
        self._model = (model,)  # in a tuple, because a module's attribute would be registered

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of the model, or hidden states of the stage before; to hidden states, or the
        model's outputs."""
        (model,) = self._model
        if self.part.is_first:
            x = model.enter(x)
        tables = model.tables()
        for block in self.blocks.values():
            x = block(x, *tables)
        return model.leave(x) if self.part.is_last else x


def _ends(model: Transformer, part: StagePart, tied: bool) -> tuple[str, ...]:
    """The names of the modules outside of the blocks that a stage has."""
    first = model.FIRST if part.is_first or (part.is_last and tied) else ()
    return (*first, *(model.LAST if part.is_last else ()))


def keep_stages(model: Transformer, parts: Sequence[StagePart], tied: bool) -> None:
    """Remove from `model`, in place, what none of this rank's stages computes, and add the stages
    as `model.stages`. `tied`: the last stage keeps a copy of what it shares with the first."""
    kept = [name for part in parts for name in part.block_names]
    model.blocks = nn.ModuleDict({name: model.blocks[name] for name in sorted(kept, key=int)})
    ends = {name for part in parts for name in _ends(model, part, tied)}
    for name in {*model.FIRST, *model.LAST} - ends:
        delattr(model, name)
    model.stages = nn.ModuleList(StageModule(model, part, tied) for part in parts)


def hidden_meta(
    spec: TrainingSpec, shapes: tuple[Shape, Shape, Shape], input_dtype: torch.dtype
) -> Tensor:
    """What a stage passes on of a micro-batch, on the meta device; `shapes`: see `Pipeline`."""
    _, hidden, _ = _metas(spec, shapes, input_dtype)
    return hidden


def own_stages(model: nn.Module) -> list[StageModule]:
    """This rank's stages of a model; none if it is not divided into stages."""
    return list(getattr(model, "stages", ()))


def has_last_stage(model: nn.Module) -> bool:
    """Whether this rank computes the model's outputs."""
    stages = own_stages(model)
    return not stages or any(stage.part.is_last for stage in stages)


def _report_nothing(name: str, micro_batch: int, stage: int) -> None:
    """The report before the first step: it says nothing."""


def _metas(
    spec: TrainingSpec, shapes: tuple[Shape, Shape, Shape], input_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A micro-batch's inputs, hidden states and outputs on the meta device."""
    parallel, dtype = spec.parallel, getattr(torch, spec.model.dtype)
    inputs, (batch, length, dim), (*rows, columns) = shapes
    if parallel.sequence_parallel:
        length //= parallel.tp
    if parallel.vocabulary_parallel:
        columns //= parallel.tp
    with torch.device("meta"):
        return (
            torch.empty(inputs, dtype=input_dtype),
            torch.empty((batch, length, dim), dtype=dtype, requires_grad=True),
            torch.empty((*rows, columns), dtype=dtype, requires_grad=True),
        )


class Pipeline:
    """The pipeline of one attempt, as one rank runs it."""

    def __init__(
        self,
        model: Transformer,
        spec: TrainingSpec,
        mesh: DeviceMesh,
        *,
        micro_batches: int,
        shapes: tuple[Shape, Shape, Shape],
        input_dtype: torch.dtype,
        loss: Callable[[Tensor, Tensor], Tensor],
        device: str,
    ) -> None:
        """`shapes`: of a micro-batch's inputs, hidden states and outputs, where `tp` does not
        divide them. `loss` is summed over a micro-batch."""
        logging.getLogger(_SCHEDULE_LOG).setLevel(logging.CRITICAL)  # it prints whole schedules
        parallel, self._axis = spec.parallel, mesh[PIPELINE_AXIS]
        stages = own_stages(model)
        self._model = model
        self._loss = loss
        self._divisor = 1
        self._losses: list[Tensor] = []
        self._report: ChunkReporter = _report_nothing
        self._is_first = any(stage.part.is_first for stage in stages)
        self._is_last = has_last_stage(model)
        self._is_tied = spec.model.tied_embeddings and (self._is_first or self._is_last)
        count = self._axis.size() * len(stages)
        inputs, hidden, outputs = _metas(spec, shapes, input_dtype)
        torch_stages = [
            _ReportingStage(
                stage,
                count,
                self._axis,
                torch.device(device),
                inputs if stage.part.is_first else hidden,
                outputs if stage.part.is_last else hidden,
                self,
            )
            for stage in stages
        ]
        options: dict[str, Any] = {"loss_fn": self._share_of_loss, "scale_grads": False}
        self._schedule: Any
        if parallel.schedule in ONE_STAGE:
            is_short = micro_batches < count  # then all forward passes come first anyway
            schedule = ONE_STAGE["gpipe" if is_short else parallel.schedule]
            self._schedule = schedule(torch_stages[0], micro_batches, **options)
        else:
            several: list[Any] = list(torch_stages)
            self._schedule = SEVERAL_STAGES[parallel.schedule](several, micro_batches, **options)

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        divisor: int,
        report: ChunkReporter,
    ) -> list[Tensor]:
        """Both passes of all micro-batches; gradients, of the loss divided by `divisor`, are summed
        and, with FSDP, reduced once. Returns the losses, each summed over its micro-batch, on the
        rank of the last stage."""
        self._losses, self._divisor, self._report = [], divisor, report
        arguments = (torch.cat(tuple(inputs)),) if self._is_first else ()
        options = {"target": torch.cat(tuple(targets)), "losses": []} if self._is_last else {}
        try:
            self._schedule.step(*arguments, return_outputs=False, **options)
        except RuntimeError as error:
            # torch hides an error of a pass behind one of its own that prints all arguments.
            raise (error.__cause__ or error) from None
        if self._is_tied:
            self._add_gradient_of_copy()
        return self._losses

    def report(self, name: str, micro_batch: int, stage: int) -> None:
        """A pass of a stage begins."""
        self._report(name, micro_batch, stage)

    def _add_gradient_of_copy(self) -> None:
        """Add up the gradients of the embedding, which the first and the last stage have."""
        gradient = self._model.get_parameter("embedding.weight").grad
        assert gradient is not None
        own, group = local_of(gradient), self._axis.get_group()
        me, last = self._axis.get_local_rank(), self._axis.size() - 1
        peer, other = last - me, torch.empty_like(own)
        send = dist.P2POp(dist.isend, own, group=group, group_peer=peer)
        receive = dist.P2POp(dist.irecv, other, group=group, group_peer=peer)
        transfers = [counted(send, _link(me, peer)), counted(receive, _link(peer, me))]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        own.add_(other)

    def _share_of_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._loss(outputs, targets)
        self._losses.append(loss.detach())
        return loss / self._divisor


def _link(source: int, target: int) -> str:
    return link_name(PIPELINE_AXIS, source, target)


class _ReportingStage(PipelineStage):
    """A stage that reports its passes, and counts its transfers."""

    def __init__(
        self,
        stage: StageModule,
        count: int,
        axis: DeviceMesh,
        device: torch.device,
        inputs: Tensor,
        outputs: Tensor,
        pipeline: Pipeline,
    ) -> None:
        super().__init__(
            stage,
            stage.part.index,
            count,
            device,
            input_args=(inputs,),
            output_args=(outputs,),
            group=axis.get_group(),
        )
        self._coordinate = axis.get_local_rank()
        self._pipeline = pipeline

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._received(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._received(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._pipeline.report("forward", fwd_chunk_id, self.stage_index)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._pipeline.report("backward", bwd_chunk_id, self.stage_index)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._pipeline.report("backward", bwd_chunk_id, self.stage_index)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _received(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return [counted(op, _link(op.group_peer, self._coordinate)) for op in ops]

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return [counted(op, _link(self._coordinate, op.group_peer)) for op in ops]
