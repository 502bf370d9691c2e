"""Worlds in which a single rank hangs at a random place of a step.

A small model of collectives determines the inspection of the other ranks. The n-th collective that
each member of a group enters is the same collective. It ends for all members once all have entered
it with the same kind. A member that only begins a collective waits for it later.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from holdfast_service.diagnosis.collective_waits import WORLD, all_groups
from holdfast_service.diagnosis.hang_culprit import WorldObservation
from holdfast_service.placement.replica_placement import AxisGroup
from holdfast_workers.protocol.messages import Beat, GroupBeat, Inspection

HANG_KINDS = ("stopped", "loop", "gil", "read", "device", "unseen", "left out")
LIMIT_S = 1.0


@dataclass(frozen=True)
class Op:
    """An operation of every rank in a step: compute, or begin or end a collective."""

    phase: str
    micro_batch: int
    axis: str = ""
    kind: str = ""
    begins: bool = False
    ends: bool = False


@dataclass
class Rank:
    number: int
    at: int = 0
    entered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    kinds: dict[tuple[str, int], str] = field(default_factory=dict)
    moved_at: int = 0
    inside: bool = False
    """Whether the rank is in a collective that it cannot leave yet."""


@dataclass
class HungWorld:
    """The look at a world in which rank `culprit` hangs by `hang_kind`."""

    mesh: dict[str, int]
    culprit: int
    hang_kind: str
    look: WorldObservation


def draw(seed: int) -> HungWorld:
    chance = random.Random(seed)
    mesh = chance.choice(
        [
            {"dp_shard": 2, "tp": 2},
            {"dp_shard": 4, "tp": 2},
            {"dp_shard": 2, "tp": 4},
            {"dp_shard": 4, "tp": 1},
            {"dp_shard": 2, "tp": 1},
            {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
            {"dp_shard": 8, "tp": 4},
            {"dp_shard": 2, "cp": 2, "tp": 2},
            {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 1},
            {"pp": 2, "dp_shard": 2, "tp": 1},
            {"pp": 4, "dp_shard": 1, "tp": 2},
            {"pp": 4, "dp_shard": 2, "tp": 1},
            {"pp": 2, "dp_shard": 2, "tp": 2},
        ]
    )
    world_size = 1
    for size in mesh.values():
        world_size *= size
    stages = _stages(chance, mesh) if "pp" in mesh else [_program(chance, mesh)]
    steps = [stages[rank * len(stages) // world_size] * 3 for rank in range(world_size)]
    culprit, hang_kind = chance.randrange(world_size), chance.choice(HANG_KINDS)
    own = steps[culprit]
    length = len(own) // 3
    place = chance.randrange(length, 2 * length)
    if hang_kind == "left out":
        whole = [i for i in range(length, 2 * length) if own[i].begins and own[i].ends]
        place = chance.choice(whole)
    ranks = _run(chance, mesh, steps, culprit, place, hang_kind)
    return HungWorld(mesh, culprit, hang_kind, _seen(chance, ranks, steps, culprit, hang_kind))


def _program(chance: random.Random, mesh: dict[str, int]) -> list[Op]:
    """A step of a sharded model: parameters gathered before use, positions over `cp`, sums over
    `tp`, scattered gradients, and at the end the step agreement of the whole world."""
    sharded = [axis for axis in mesh if axis not in ("cp", "tp") and mesh[axis] > 1]
    if "cp" in mesh:
        sharded = [axis for axis in sharded if axis != "dp_shard"] + ["dp_shard+cp"]
    ops: list[Op] = [Op("load", 0)]
    for micro_batch in range(chance.randint(1, 2)):
        for phase in ("forward", "backward"):
            for _ in range(chance.randint(1, 3)):
                ahead = chance.random() < 0.5
                for axis in sharded[-1:]:
                    ops.append(Op(phase, micro_batch, axis, "all_gather", True, not ahead))
                ops.append(Op(phase, micro_batch))
                for axis in sharded[-1:] if ahead else ():
                    ops.append(Op(phase, micro_batch, axis, "all_gather", ends=True))
                if "cp" in mesh:
                    ops.append(Op(phase, micro_batch, "cp", "all_gather", True, True))
                if mesh["tp"] > 1:
                    ops.append(Op(phase, micro_batch, "tp", "all_reduce", True, True))
                ops.append(Op(phase, micro_batch))
                if phase == "backward":
                    for axis in sharded[-1:]:
                        ops.append(Op(phase, micro_batch, axis, "reduce_scatter", True, True))
    for axis in sharded[:-1]:
        ops.append(Op("reduce", 0, axis, "all_reduce", True, True))
    ops += [Op("reduce", 0), Op("reduce", 0, WORLD, "all_gather", True, True), Op("optimizer", 0)]
    return ops


def _stages(chance: random.Random, mesh: dict[str, int]) -> list[list[Op]]:
    """The step of each stage of a pipeline: all forward passes first, or forward and backward in
    turns. A send is waited for before the next one to the same stage."""
    count, micro_batches = mesh["pp"], chance.randint(2, 6)
    in_turns, split = chance.random() < 0.5, mesh["tp"] > 1
    return [
        _stage(stage, count, _order(stage, count, micro_batches, in_turns), split, mesh)
        for stage in range(count)
    ]


def _order(stage: int, count: int, micro_batches: int, in_turns: bool) -> list[tuple[str, int]]:
    ahead = min(micro_batches, count - stage) if in_turns else micro_batches
    order = [("forward", index) for index in range(ahead)]
    for index in range(micro_batches):
        order.append(("backward", index))
        if ahead + index < micro_batches:
            order.append(("forward", ahead + index))
    return order


def _stage(
    stage: int, count: int, order: list[tuple[str, int]], split: bool, mesh: dict[str, int]
) -> list[Op]:
    ops = [Op("load", 0)]
    sent: set[str] = set()
    sharded = [axis for axis in ("dp_shard",) if mesh[axis] > 1]
    ops += [Op("forward", 0, axis, "all_gather", True, True) for axis in sharded]
    for phase, index in order:
        way = 1 if phase == "forward" else -1
        before, after = stage - way, stage + way
        if 0 <= before < count:
            ops.append(Op(phase, index, f"pp {before}>{stage}", "transfer", True, True))
        if split:
            ops.append(Op(phase, index, "tp", "all_reduce", True, True))
        ops.append(Op(phase, index))
        if 0 <= after < count:
            link = f"pp {stage}>{after}"
            if link in sent:
                ops.append(Op(phase, index, link, ends=True))
            sent.add(link)
            ops.append(Op(phase, index, link, "transfer", begins=True))
    ops += [Op("backward", order[-1][1], link, ends=True) for link in sorted(sent)]
    ops += [Op("backward", order[-1][1], axis, "reduce_scatter", True, True) for axis in sharded]
    ops += [Op("reduce", 0), Op("reduce", 0, WORLD, "all_gather", True, True), Op("optimizer", 0)]
    return ops


def _run(
    chance: random.Random,
    mesh: dict[str, int],
    steps: list[list[Op]],
    culprit: int,
    place: int,
    hang_kind: str,
) -> list[Rank]:
    """Advance all ranks until no rank can advance."""
    ranks = [Rank(number) for number in range(len(steps))]
    members = {(group.axis, rank): group for group in all_groups(mesh) for rank in group.ranks}
    clock, moved = 0, True
    while moved:
        moved = False
        for rank in chance.sample(ranks, len(ranks)):
            clock += 1
            ops = steps[rank.number]
            hangs = rank.number == culprit and rank.at == place
            if hangs and hang_kind == "left out":
                rank.at += 1
            elif hangs or rank.at == len(ops):
                continue
            if _advance(rank, ops[rank.at], ranks, members):
                rank.moved_at, moved = clock, True
    return ranks


def _advance(
    rank: Rank, op: Op, ranks: list[Rank], members: dict[tuple[str, int], AxisGroup]
) -> bool:
    """Advance the rank in its operation. False if it could not advance."""
    begun = False
    if op.begins and not rank.inside:
        rank.entered[op.axis] += 1
        rank.kinds[op.axis, rank.entered[op.axis]] = op.kind
        begun = rank.inside = True
    if op.ends:
        rank.inside = True
        number = rank.left[op.axis] + 1
        group = members[op.axis, rank.number]
        kinds = {ranks[rank_number].kinds.get((op.axis, number)) for rank_number in group.ranks}
        if len(kinds) > 1:
            return begun
        rank.left[op.axis] = number
    rank.at, rank.inside = rank.at + 1, False
    return True


def _seen(
    chance: random.Random,
    ranks: list[Rank],
    steps: list[list[Op]],
    culprit: int,
    hang_kind: str,
) -> WorldObservation:
    seen: dict[int, Inspection] = {}
    silent: dict[int, str] = {}
    for rank in ranks:
        ops = steps[rank.number]
        at, length = min(rank.at, len(ops) - 1), len(ops) // 3
        op = ops[at]
        beat = Beat(
            rank=rank.number,
            worker=f"n0.i1.{rank.number}",
            pid=100 + rank.number,
            attempt=1,
            step=1 + at // length,
            phase=op.phase,
            micro_batch=op.micro_batch,
            age_s=LIMIT_S + chance.uniform(0.1, 1.0),
            limit_s=LIMIT_S,
            groups=tuple(_group(rank, op, axis) for axis in rank.entered),
        )
        inspection = Inspection(beat, "S", ("wait (gloo.cc:12)", "collective (distributed.py:99)"))
        if rank.number == culprit:
            if hang_kind == "unseen":
                silent[rank.number] = "agent n3 did not answer"
                continue
            inspection = _of_culprit(beat, hang_kind, inspection)
        seen[rank.number] = inspection
    return WorldObservation(seen, silent)


def _group(rank: Rank, op: Op, axis: str) -> GroupBeat:
    entered, left = rank.entered[axis], rank.left[axis]
    if axis.startswith("pp "):  # a transfer is entered while it is waited for
        entered, left = (left + 1, left) if rank.inside and op.axis == axis else (entered, entered)
    return GroupBeat(axis, entered, left, rank.kinds[axis, entered])


def _of_culprit(beat: Beat, hang_kind: str, waiting: Inspection) -> Inspection:
    match hang_kind:
        case "stopped":
            return Inspection(beat, "T", problem="the process is stopped")
        case "loop":
            return Inspection(beat, "R", ("spin (user.py:3)", "forward (model.py:7)"))
        case "gil":
            return Inspection(beat, "R", problem="timed out")
        case "read":
            return Inspection(beat, "S", ("read (user.py:9)", "load (data.py:5)"))
        case "device":
            return Inspection(beat, "D", ("read (user.py:9)", "load (data.py:5)"))
        case _:
            return waiting
