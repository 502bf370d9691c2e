"""Training of the built-in models: FSDP2 × context × tensor parallel; a task per family.

The state of a step consists of the parameters, the moments of the optimizer, the weights' moving
averages if the spec has them, the guards' memory, and the step itself, which determines learning
rate and random numbers. So ranks that differ only in `dp_replicate` hold the same payload, byte for
byte. A step reads the window of the sample order that the ledger assigns to it, in micro-batches
dealt to the data-parallel ranks; the loss is the sum over targets divided by the number of targets
of the whole global batch. The micro-batches of the next step are read while a step computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from holdfast_workers.data.sample_order import Indices, passes
from holdfast_workers.models.llama import Llama
from holdfast_workers.models.transformer import BlockModel, Transformer
from holdfast_workers.optim.gradients import clip, squared_norm
from holdfast_workers.optim.local_optimizer import LocalOptimizer, NoPeers
from holdfast_workers.optim.new_optimizer import local_parameter, new_optimizer
from holdfast_workers.optim.schedule import learning_rate
from holdfast_workers.parallelize.mesh import (
    CONTEXT_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    data_index,
    data_parallel,
    fake_process_group,
    make_mesh,
)
from holdfast_workers.parallelize.parallel_model import apply_parallelism, needs_mesh
from holdfast_workers.parallelize.parameter_peers import MeshPeers
from holdfast_workers.parallelize.pipeline import ChunkReporter, Pipeline, has_last_stage
from holdfast_workers.parallelize.replicate import GradientSums, is_replicated_only
from holdfast_workers.parallelize.shard import (
    SMALL_MODEL_BYTES,
    CannotRebind,
    discard_step,
    rebind_groups,
    set_last_micro_batch,
    whole_bytes,
)
from holdfast_workers.parallelize.vocabulary import loss_over_vocabulary
from holdfast_workers.progress import beacon
from holdfast_workers.published.weight_reader import WeightReader
from holdfast_workers.recipes.batches_ahead import BatchesAhead, wait_for_data
from holdfast_workers.recipes.evaluation import Evaluation
from holdfast_workers.recipes.evaluation_passes import (
    exchanged,
    passes_of_model,
    passes_of_stages,
)
from holdfast_workers.recipes.micro_batches import (
    MicroBatch,
    WindowShare,
    at_positions,
    read_window,
)
from holdfast_workers.recipes.parameter_checksum import ParameterChecksum
from holdfast_workers.recipes.state_pieces import restart_averages, state_pieces
from holdfast_workers.recipes.task import Task, new_task
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.layout import MODEL_PREFIX, StateLayout
from holdfast_workers.state.rank_state import (
    RankState,
    ShardBox,
    Snapshot,
    StateMismatch,
    StateTensor,
    local_of,
    shard_box_of,
    sharded_dimensions,
)
from holdfast_workers.state.replicas import REPLICATED_AXIS
from holdfast_workers.training.early_stop import EvaluationMemory
from holdfast_workers.training.evaluation import EvaluationShare
from holdfast_workers.training.guards import NonfiniteOrigin
from holdfast_workers.training.nonfinite_tracing import NonfiniteTracer, all_finite
from holdfast_workers.training.recipe import (
    Agree,
    Gate,
    PhaseReporter,
    Recipe,
    StepOutcome,
    World,
    raise_if_refused,
)
from holdfast_workers.training.step_agreement import Contribution
from holdfast_workers.training.step_seeds import seed_generators

CHECKS_OF_A_STAGE = 100_000
"""Distance between the numbers of two stages' checks for non-finite values: more than a stage makes
in a micro-batch."""


@dataclass
class _BuiltRecipe:
    """The objects that exist once the recipe has been built on a mesh."""

    world: World
    mesh: DeviceMesh | None
    model: BlockModel
    parameters: list[torch.nn.Parameter]
    names: list[str]
    boxes: list[ShardBox]
    locals: list[Tensor]
    optimizer: LocalOptimizer
    averages: list[Tensor]
    """Moving averages of `locals`; [] without."""
    constants: list[StateTensor]
    """What is saved with the parameters, though no step changes it."""
    state: RankState
    sums: GradientSums | None
    """Sums of gradients, if the model is replicated and not sharded."""
    checksum: ParameterChecksum
    """Checksum of the parameters between two steps; without tensors if replicas are not
    compared."""


class PretrainRecipe(Recipe):
    """The built-in recipe `pretrain`."""

    def __init__(self, spec: TrainingSpec, cache_dir: Path) -> None:
        super().__init__(spec, cache_dir)
        self._task: Task | None = None
        self._built: _BuiltRecipe | None = None
        self._expected: _BuiltRecipe | None = None
        self._pipeline: Pipeline | None = None
        """The pipeline of this attempt, once a step has begun."""
        self._beacon: beacon.Beacon | None = None
        """Of the training thread, for others that read data."""
        self._losses: list[Tensor] = []
        """Losses of the micro-batches of the last computed step."""
        self._batches = BatchesAhead(self._read_window)
        self._evaluation: Evaluation | None = None
        self.evaluation_memory = EvaluationMemory(spec.evaluate)
        self.published_weights: WeightReader | None = None
        """What `initialize` takes the parameters from; None: from the seed."""

    @property
    def model(self) -> BlockModel:
        """The built model, sharded over the mesh."""
        return self._require_built().model

    def local_tensors(self, what: str) -> dict[str, Tensor]:
        built = self._require_built()
        if what == "moment":
            firsts: dict[str, Tensor] = {}
            for moment in built.optimizer.moments:
                firsts.setdefault(moment.parameter.name, moment.tensor)
            return firsts
        if what == "gradient":
            tensors = [_gradient(parameter) for parameter in built.parameters]
        else:
            tensors = built.locals
        return dict(zip(built.names, tensors, strict=True))

    # --- building and rebuilding ------------------------------------------------------------

    def prepare(self) -> None:
        self._task = new_task(self.spec, self.cache_dir, self._waiting_for_data, self._show_window)
        if self.spec.evaluate.every_steps:

            def own() -> Indices | None:
                return self._own_positions(self._require_built())

            self._evaluation = Evaluation(self.spec, self.cache_dir, self._waiting_for_data, own)
            self.evaluation_memory.subject = self._evaluation.subject()

    def _show_window(self, window: int) -> None:
        if self._beacon is not None:
            self._beacon.show_window(window)

    def _waiting_for_data(self) -> AbstractContextManager[Callable[[], None]]:
        return wait_for_data(self.leave_if_over)

    def expect(self, world: World) -> bool:
        if self._expected is not None:  # forked from a process that had built it
            return True
        if self.spec.model.compile or world.device != "cpu":
            return False
        with fake_process_group(world):
            mesh, model = self._sharded_model(world)
            if whole_bytes(model) <= SMALL_MODEL_BYTES:
                self._expected = self._finish_build(world, mesh, model)
                if world.size(PIPELINE_AXIS) == 1:
                    self._rehearse(self._expected)
        return self._expected is not None

    def _rehearse(self, built: _BuiltRecipe) -> None:
        """Compute one step on zeros, so that torch determines and caches the sharding of each
        operation. The result is discarded."""
        for local in built.locals:
            local.zero_()
        stand_in, _ = self._require_task().stand_in()
        inputs = torch.from_numpy(at_positions(stand_in, self._own_positions(built)))
        set_last_micro_batch(built.model, True)
        torch.autograd.backward(built.model(inputs).float().sum())
        squared_norm([_gradient(parameter) for parameter in built.parameters])
        discard_step(built.model)

    def build(self, world: World) -> None:
        self._drop_batches()
        self._built = self._pipeline = None
        self.applied_step = -1
        self._built, self._expected = self._expected, None
        if self._built is None:
            self._built = self._finish_build(world, *self._sharded_model(world))
        else:
            self.rebind(world)

    def _finish_build(
        self, world: World, mesh: DeviceMesh | None, model: BlockModel
    ) -> _BuiltRecipe:
        model.to_empty(device=world.device)
        model.reset_tables()
        model.train()
        return self._assemble(world, mesh, model)

    def initialize(self) -> None:
        built, task = self._require_built(), self._require_task()
        family = self.spec.model.family
        for name, box, local in (
            *zip(built.names, built.boxes, built.locals, strict=True),
            *((_own_name(each), each.box, each.tensor) for each in built.constants),
        ):
            if self.published_weights is not None:
                self.published_weights.fill_parameter(local, name, box, family)
            elif self.spec.model.published is not None:
                # A checkpoint has the weights. Were one not loaded, the first step would show it.
                local.fill_(math.nan)
            else:
                local.copy_(task.initial_values(name, box.global_shape)[box.slices()])
        built.optimizer.zero_state()
        restart_averages(built.averages, built.locals)
        self.guard_memory.reset()
        self.evaluation_memory.reset()
        built.checksum.record()
        self.applied_step = 0

    def rebind(self, world: World) -> None:
        built = self._require_built()
        if (world.mesh, world.rank) != (built.world.mesh, built.world.rank):
            raise ValueError(f"cannot rebind from {built.world} to {world}: build instead")
        self._drop_batches()
        self._pipeline = None
        if built.mesh is not None:
            try:
                rebind_groups(built.model, built.mesh, self._mesh(world))
            except CannotRebind:
                self.build(world)
                return
        built.world = world

    def abandon_step(self) -> None:
        self._drop_batches()
        self._pipeline = None  # it holds process groups, and a part of the step
        if self._built is not None:
            if self._built.sums is not None:
                self._built.sums.discard()
            discard_step(self._built.model)

    # --- state ------------------------------------------------------------------------------

    def layout(self) -> StateLayout:
        return self._require_built().state.layout

    def freeze(self, step: int) -> Snapshot:
        return self._require_built().state.freeze(self._small_state(step))

    def read_state(self, payload: memoryview) -> int:
        built = self._require_built()
        self.applied_step = -1
        small = built.state.read(payload)
        step = int(small.get("step", -1))
        if small != self._small_state(step):
            raise StateMismatch(
                f"the state is of another run: {small}, this run has {self._small_state(step)}"
            )
        self.guard_memory.adopt_loaded_state(step)
        built.optimizer.set_steps_taken(step)
        if step == 0:  # the weights may be those of `init_from`
            restart_averages(built.averages, built.locals)
        built.checksum.record()
        self.applied_step = step
        return step

    def state_digest(self, step: int) -> str:
        return self._require_built().state.digest(self._small_state(step))

    def parameters(self) -> int | None:
        return self._require_task().parameters

    # --- one step ---------------------------------------------------------------------------

    def train_step(self, step: int, agree: Agree, gate: Gate, phase: PhaseReporter) -> StepOutcome:
        built, train = self._require_built(), self.spec.train
        self._beacon = beacon.current()
        self._seed_generators(step)
        share = self._forward_backward(step, phase)
        gradients = [_gradient(parameter) for parameter in built.parameters]
        phase("agree", step)
        agreed = agree(share)
        raise_if_refused(agreed)
        gate(step)
        phase("optimizer", step)
        lr = learning_rate(train, step)
        self.applied_step = -1
        clip(gradients, agreed.grad_norm, train.clip_grad_norm)
        built.optimizer.step(gradients, lr)
        if train.ema is not None:
            torch._foreach_lerp_(built.averages, built.locals, 1.0 - train.ema)
        for parameter in built.parameters:
            parameter.grad = None
        self.guard_memory.record_step(step, agreed.loss, agreed.grad_norm)
        built.checksum.record()
        self.applied_step = step
        tokens = train.global_batch * self._require_task().tokens_per_sample
        return StepOutcome(agreed=agreed, lr=lr, tokens=tokens)

    def observed_nonfinite(self) -> NonfiniteOrigin | None:
        built = self._require_built()
        for index, loss in enumerate(self._losses):
            if not all_finite([loss]):
                return NonfiniteOrigin(built.world.rank, index, 0, "", "loss", again=False)
        # Backward passes spread it to all earlier layers: it began in the last affected one.
        for name, parameter in reversed([*zip(built.names, built.parameters, strict=True)]):
            if not all_finite([_gradient(parameter)]):
                return NonfiniteOrigin(built.world.rank, -1, 0, name, "gradient", again=False)
        return None

    def trace(self, step: int) -> NonfiniteOrigin | None:
        built = self._require_built()
        self._seed_generators(step)
        state = [*built.locals, *(moment.tensor for moment in built.optimizer.moments)]
        state_is_finite = all_finite(state)
        with NonfiniteTracer(built.model, built.world.rank) as tracer:
            if self._is_pipeline():
                self._trace_pipeline(step, tracer)
            else:
                self._trace_passes(step, tracer)
        # Decided only now, because the passes need all ranks.
        in_state = NonfiniteOrigin(built.world.rank, -1, 0, "the parameters or moments", "state")
        return tracer.origin if state_is_finite else in_state

    def _trace_passes(self, step: int, tracer: NonfiniteTracer) -> None:
        built = self._require_built()
        for index in range(self._micro_batches()):
            tracer.start_micro_batch(index)
            read = self._read(step, index)
            # No reduction: one rank's non-finite values must not reach the others.
            self._set_last_micro_batch(False)
            loss = self._loss(built.model(read.inputs), read.targets)
            tracer.check([loss], "the loss", "output")
            torch.autograd.backward(loss / read.targets_of_step)

    def _seed_generators(self, step: int) -> None:
        """Tensor-parallel peers compute the same activations, so they need the same dropout masks,
        unless each computes other positions. The stages of a pipeline compute other layers."""
        world = self._require_built().world
        index = data_index(world) * world.size(CONTEXT_AXIS) + world.coordinate(CONTEXT_AXIS)
        if self.spec.parallel.sequence_parallel:
            index = index * world.size(TENSOR_AXIS) + world.coordinate(TENSOR_AXIS)
        index = index * world.size(PIPELINE_AXIS) + world.coordinate(PIPELINE_AXIS)
        seed_generators(self.spec.train.seed, step, index, world.device)

    def _micro_batches(self) -> int:
        train = self.spec.train
        return passes(
            train.global_batch, train.micro_batch, data_parallel(self._require_built().world)
        )

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, summed over the targets of a micro-batch."""
        built = self._require_built()
        if self.spec.parallel.vocabulary_parallel and built.world.size(TENSOR_AXIS) > 1:
            assert built.mesh is not None
            return loss_over_vocabulary(outputs, targets, built.mesh[TENSOR_AXIS])
        return self._require_task().loss(outputs, targets)

    def _forward_backward(self, step: int, phase: PhaseReporter) -> Contribution:
        built, micro_batches = self._require_built(), self._micro_batches()
        loss_sum = torch.zeros((), dtype=torch.float64, device=built.world.device)
        digest, samples, counted = 0, 0, 0
        self._losses = []
        batches: list[MicroBatch] = []
        for index in range(micro_batches):
            phase("load", step, index)
            read = self._read(step, index)
            self.leave_if_over()
            if index == 0 and step < self.spec.train.last_step:
                self._batches.read_ahead(self._window_share(step + 1))
            digest = (digest + read.digest) % (1 << 64)
            samples += read.samples
            counted += read.counted
            if self._is_pipeline():
                batches.append(read)
                continue
            self._set_last_micro_batch(index == micro_batches - 1)
            phase("forward", step, index)
            loss = self._loss(built.model(read.inputs), read.targets)
            phase("backward", step, index)
            torch.autograd.backward(loss / read.targets_of_step)
            self._losses.append(loss.detach())
        if built.sums is not None:
            built.sums.finish()
        if batches:
            report = partial(self._report_chunk, step, phase)
            self._losses = self._run_pipeline(batches, report)
        for loss in self._losses:
            loss_sum += loss
        return self._share(float(loss_sum), counted, samples, digest)

    def _set_last_micro_batch(self, last: bool) -> None:
        built = self._require_built()
        set_last_micro_batch(built.model, last, self.spec.parallel.zero)
        if built.sums is not None:
            built.sums.set_last_micro_batch(last)

    # --- the passes of a pipeline -----------------------------------------------------------

    def _is_pipeline(self) -> bool:
        return self._require_built().world.size(PIPELINE_AXIS) > 1

    def _run_pipeline(self, batches: Sequence[MicroBatch], report: ChunkReporter) -> list[Tensor]:
        """Compute both passes of all micro-batches. Returns their losses on the rank of the last
        stage."""
        if self._pipeline is None:
            self._pipeline = self._new_pipeline(batches[0].inputs)
        inputs = [batch.inputs for batch in batches]
        targets = [batch.targets for batch in batches]
        return self._pipeline.run(inputs, targets, batches[0].targets_of_step, report)

    def _new_pipeline(self, inputs: Tensor) -> Pipeline:
        built = self._require_built()
        assert built.mesh is not None and isinstance(built.model, Transformer)
        hidden, outputs = self._require_task().shapes(inputs)
        return Pipeline(
            built.model,
            self.spec,
            built.mesh,
            micro_batches=self._micro_batches(),
            shapes=(tuple(inputs.shape), hidden, outputs),
            input_dtype=inputs.dtype,
            loss=self._loss,
            device=built.world.device,
        )

    def _report_chunk(
        self, step: int, phase: PhaseReporter, name: str, micro_batch: int, stage: int
    ) -> None:
        self.leave_if_over()
        phase(name, step, micro_batch)

    def _trace_pipeline(self, step: int, tracer: NonfiniteTracer) -> None:
        pp = self._require_built().world.size(PIPELINE_AXIS)
        stages = pp * self.spec.parallel.stages_on_a_rank

        def report(name: str, micro_batch: int, stage: int) -> None:
            passed = stage if name == "forward" else 2 * stages - stage
            tracer.start_micro_batch(micro_batch, passed * CHECKS_OF_A_STAGE)

        batches = [self._read(step, index) for index in range(self._micro_batches())]
        losses = self._run_pipeline(batches, report)
        for index, loss in enumerate(losses):
            tracer.start_micro_batch(index, stages * CHECKS_OF_A_STAGE)
            tracer.check([loss], "the loss", "output")

    # --- evaluation -------------------------------------------------------------------------

    def evaluate(self, step: int, phase: PhaseReporter) -> EvaluationShare:
        """See `EvaluatedRecipe`."""
        built = self._require_built()
        if self._evaluation is None:
            raise RuntimeError("the spec has no evaluation")
        loss, average = self._evaluated_loss, self.spec.evaluate.weights == "average"
        passes = passes_of_model(built.model, loss)
        if self._is_pipeline():
            assert built.mesh is not None and isinstance(built.model, Transformer)
            passes = passes_of_stages(
                built.model, self.spec, built.mesh, self._require_task(), loss
            )
        with exchanged(built.locals, built.averages) if average else nullcontext():
            return self._evaluation.share(
                built.model, built.world, step, passes, phase, self.leave_if_over
            )

    def _evaluated_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._evaluation is not None
        loss = self._loss(outputs, targets)  # before a user's function can change its arguments
        self._evaluation.record(outputs, targets)
        return loss

    # --- the data of a step -----------------------------------------------------------------

    def _drop_batches(self) -> None:
        self._batches.drop()
        if self._evaluation is not None:
            self._evaluation.drop()

    def _read(self, step: int, micro_batch_index: int) -> MicroBatch:
        """The next micro-batch of a step, on the device; from index 0 on, in their order."""
        if micro_batch_index == 0:
            self._batches.begin(self._window_share(step))
        return self._batches.take(self.leave_if_over).on(self._require_built().world.device)

    def _window_share(self, step: int) -> WindowShare:
        return WindowShare(self.guard_memory.ledger.window(step), self._require_built().world)

    def _read_window(self, share: WindowShare) -> Iterator[MicroBatch]:
        own = self._own_positions(self._require_built())
        return read_window(share, self._require_task(), self.spec.train, own)

    def _own_positions(self, built: _BuiltRecipe) -> Indices | None:
        """The positions of each sequence that this rank computes; None for all."""
        if built.world.size(CONTEXT_AXIS) == 1:
            return None
        assert isinstance(built.model, Llama)
        own: Indices = built.model.positions.numpy()
        return own

    def _share(self, loss_sum: float, counted: int, samples: int, digest: int) -> Contribution:
        """This rank's contribution; a value that several ranks share is contributed by one."""
        built = self._require_built()
        of_share = [
            _gradient(parameter)
            for parameter, box in zip(built.parameters, built.boxes, strict=True)
            if box.primary
        ]
        grad_sq = squared_norm(of_share)
        # Of the ranks that know the loss of a micro-batch; those of `cp`, of parts of it.
        tells = built.world.coordinate(TENSOR_AXIS) == 0 and has_last_stage(built.model)
        return Contribution(
            loss_sum=loss_sum if tells else 0.0,
            count=counted if tells else 0,
            grad_sq=grad_sq,
            data_index=data_index(built.world),
            samples=digest,
            sample_count=samples,
            nonfinite=not (math.isfinite(loss_sum) and math.isfinite(grad_sq)),
            changed=built.checksum.has_changed(),
            loader_wait_s=self._batches.waited_s,
            fetch_wait_s=self._batches.fetch_waited_s,
            data=int(self._require_task().fingerprint[:16], 16),
        )

    # --- construction -----------------------------------------------------------------------

    def _mesh(self, world: World) -> DeviceMesh:
        return make_mesh(world, self.spec.detection.collective_timeout_s)

    def _sharded_model(self, world: World) -> tuple[DeviceMesh | None, BlockModel]:
        task = self._require_task()
        model = task.new_model()
        mesh = self._mesh(world) if needs_mesh(world, self.spec.model) else None
        apply_parallelism(model, world, mesh, self.spec, task.head_in_blocks)
        return mesh, model

    def _assemble(self, world: World, mesh: DeviceMesh | None, model: BlockModel) -> _BuiltRecipe:
        named = list(model.named_parameters())
        names = [name for name, _ in named]
        parameters = [parameter for _, parameter in named]
        boxes = [
            shard_box_of(parameter, self._replicated_on(world, name)) for name, parameter in named
        ]
        locals_ = [local_of(parameter) for parameter in parameters]
        spec = self.spec.train.optimizer
        of_blocks = {id(each) for block in model.blocks.values() for each in block.parameters()}
        optimized = [
            local_parameter(
                name,
                local,
                box.global_shape,
                sharded_dimensions(parameter),
                spec,
                in_block=id(parameter) in of_blocks,
            )
            for name, parameter, local, box in zip(names, parameters, locals_, boxes, strict=True)
        ]
        peers = NoPeers() if mesh is None else MeshPeers(world, mesh, dict(named))
        optimizer = new_optimizer(optimized, spec, peers)
        averages = [] if self.spec.train.ema is None else [local.clone() for local in locals_]
        pieces = state_pieces(
            dict(zip(names, locals_, strict=True)),
            dict(zip(names, boxes, strict=True)),
            optimizer.moments,
            averages,
        )
        constants = [
            StateTensor(
                f"{MODEL_PREFIX}{name}",
                tensor,
                shard_box_of(tensor, self._replicated_on(world, name)),
                weight=True,
            )
            for name, tensor in model.constants().items()
        ]
        pieces += constants
        pieces += self.guard_memory.pieces(primary=world.rank == 0)
        pieces += self.evaluation_memory.pieces(primary=world.rank == 0)
        sums = None
        if mesh is not None and is_replicated_only(world, self.spec.model):
            sums = GradientSums(model, mesh[REPLICATED_AXIS])
        compared = self.spec.checks.replica_digest_every_steps and world.size(REPLICATED_AXIS) > 1
        return _BuiltRecipe(
            world=world,
            mesh=mesh,
            model=model,
            parameters=parameters,
            names=names,
            boxes=boxes,
            locals=locals_,
            optimizer=optimizer,
            averages=averages,
            constants=constants,
            state=RankState(pieces),
            sums=sums,
            checksum=ParameterChecksum(locals_ if compared else ()),
        )

    def _replicated_on(self, world: World, name: str) -> dict[str, int]:
        """This rank's coordinates on the axes whose ranks have the parameter. A pipeline's stages
        have different ones, but for embeddings that the last one shares with the first."""
        shared = self.spec.model.tied_embeddings and name.startswith("embedding.")
        return {
            axis: world.coordinate(axis) for axis in world.mesh if axis != PIPELINE_AXIS or shared
        }

    def _small_state(self, step: int) -> dict[str, Any]:
        train = self.spec.train
        return {
            "step": step,
            "global_batch": train.global_batch,
            "seed": train.seed,
            # Without the fields that a schedule lacks: states of earlier versions have none.
            "schedule": train.schedule.model_dump(exclude_none=True),
            "corpus": self._require_task().fingerprint,
        }

    def _require_built(self) -> _BuiltRecipe:
        if self._built is None:
            raise RuntimeError("the recipe has not been built")
        return self._built

    def _require_task(self) -> Task:
        if self._task is None:
            raise RuntimeError("the recipe has not been prepared")
        return self._task


def _own_name(piece: StateTensor) -> str:
    """The model's name of a part of its state."""
    return piece.name.removeprefix(MODEL_PREFIX)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient: it does not contribute to the loss")
    return local_of(parameter.grad)
