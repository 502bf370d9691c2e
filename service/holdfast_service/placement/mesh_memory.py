"""The memory that a rank needs on a mesh, modelled from the sizes of the model. Pure.

Parameters, gradients and moments are float32, divided by the axes that shard the state and, in
the layers, by those that split layers. Where ranks share a state (FSDP2), parameters are gathered
for a pass, and gradients stay whole until the last pass of a step; `zero` says otherwise.
Replicas alone gather nothing: they copy gradients into buckets, one at a time.
A stage of a pipeline keeps both whole; of a pipeline, the rank with most is modelled, as if it had
embedding and head.
Memory checkpoints are in the host's memory and are not counted, nor is what the libraries allocate
for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.placement.mesh_axes import (
    Mesh,
    batch_ranks,
    is_replicated_only,
    layer_parts,
    passes,
    pipeline_ranks,
    sequence_parts,
    state_shards,
)
from holdfast_workers.byte_sizes import size_of
from holdfast_workers.spec import Schedule, Zero

STORED_BYTES = 4
"""Size of a parameter, a gradient or a moment as stored: float32."""
BUCKET_BYTES = 25 << 20
"""Size of a bucket of gradients; the same as in `parallelize/replicate.py`, which imports torch."""
GATHERED_BLOCKS = 2
"""Blocks that are whole at once where blocks are gathered singly: one computes, one arrives."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank needs, by use."""

    parameters: int
    gradients: int
    moments: int
    """With a moving average of the parameters."""
    gathered: int
    """Whole parameters and gradients while they are used."""
    activations: int
    updates: int = 0
    """Of all parameters, in the optimizer's step, when nothing is gathered or kept."""

    @property
    def total(self) -> int:
        of_passes = self.gathered + self.activations
        return self.parameters + self.gradients + self.moments + max(of_passes, self.updates)

    @property
    def described(self) -> str:
        """E.g. "1.2 GB per rank: parameters 100 MB, ..."."""
        parts = [
            f"parameters {size_of(self.parameters)}",
            f"gradients {size_of(self.gradients)}",
            f"moments {size_of(self.moments)}",
            f"gathered for a pass {size_of(self.gathered)}",
            f"activations {size_of(self.activations)}",
        ]
        if self.updates > self.gathered + self.activations:
            parts[3:] = [f"updates {size_of(self.updates)}"]
        return f"{size_of(self.total)} per rank (modelled, not measured: {', '.join(parts)})"


@dataclass(frozen=True)
class MemoryModel:
    """The sizes of a model, as numbers of elements."""

    block: int
    """Parameters of a block that axes which split layers divide."""
    blocks: int
    whole: int
    """Parameters that every rank along such an axis has."""
    divided_activations: int
    """Elements that the layers keep for the backward pass of a micro-batch, and that are divided;
    of checkpointed layers, with those of the one that computes again."""
    whole_activations: int
    """Elements that the whole model keeps in the same way, and that are not divided."""
    compute_bytes: int
    """Bytes of an element in a pass."""
    gathers_blocks: bool
    """Whether blocks are gathered singly, where `zero` does not say it; otherwise all at once."""
    vocabulary: int = 0
    """Parameters outside of the blocks that axes which split layers divide."""
    zero: Zero | None = None
    """The part of the state that is held in pieces during a step; see the spec."""
    gathered_activations: int = 0
    """Elements of `divided_activations` that a rank has of all positions where an axis divides the
    sequence."""
    schedule: Schedule = "1f1b"
    """Schedule of a pipeline."""
    moments: tuple[int, int] = (2, 2)
    """Moments of the size of a parameter: of those in `block`, and of the others."""
    exchanges_updates: bool = False
    """Whether the optimizer makes updates of whole parameters: two copies in bfloat16 of all that
    is divided."""

    def of(self, mesh: Mesh, micro_batches: int) -> RankMemory:
        """The need of a rank on `mesh`, of a global batch of `micro_batches`."""
        parts, block = layer_parts(mesh), -(-self.block // layer_parts(mesh))
        whole = self.whole + -(-self.vocabulary // parts)
        stages = pipeline_ranks(mesh)
        blocks = -(-self.blocks // stages)
        own = block * blocks + whole
        stored = STORED_BYTES * -(-own // state_shards(mesh))
        of_blocks, of_rest = self.moments
        moments = of_blocks * block * blocks + of_rest * whole
        is_shared = max(batch_ranks(mesh), state_shards(mesh)) > 1
        is_gathered = is_shared or self.compute_bytes < STORED_BYTES
        if self.zero is None:
            pieces = (self.gathers_blocks and passes(mesh, micro_batches) == 1,) * 2
        else:
            pieces = (self.zero == 3, self.zero >= 2)  # of parameters, of gradients
        if stages > 1:
            pieces = (False, False)
        few = min(GATHERED_BLOCKS, blocks)
        elements = sum(block * (few if each else blocks) + whole for each in pieces)
        gathered = self.compute_bytes * elements if is_gathered else 0
        if is_replicated_only(mesh) and self.compute_bytes == STORED_BYTES:
            gathered = min(stored, BUCKET_BYTES)
        of_all = -(-self.gathered_activations // parts)
        kept = -(-self.divided_activations // parts) + self.whole_activations - of_all
        if sequence_parts(mesh) > 1:
            kept = -(-kept // sequence_parts(mesh))
        kept += of_all
        kept = -(-kept * self._under_way(stages, passes(mesh, micro_batches)) // stages)
        return RankMemory(
            parameters=stored,
            gradients=stored,
            moments=STORED_BYTES * -(-moments // state_shards(mesh)),
            gathered=gathered,
            activations=self.compute_bytes * kept,
            updates=stored if self.exchanges_updates and parts * state_shards(mesh) > 1 else 0,
        )

    def _under_way(self, stages: int, micro_batches: int) -> int:
        """Micro-batches whose activations a rank of the first stage keeps at once."""
        if stages == 1:
            return 1
        most = {"gpipe": micro_batches, "1f1b": stages}.get(self.schedule, 2 * stages)
        return min(micro_batches, most)
