"""What the jobs of the gallery are: their specs, their faults, and what their ranks write. Only
data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast_service.job_model.events.incidents import IncidentRecord
from holdfast_service.policy.causes import Cause
from holdfast_service.policy.decision_ladder import Action, Budget
from holdfast_service.policy.incident_parts import (
    LostItem,
    RefusedDecision,
    SharedStack,
    SuspectedRank,
)

GPUS = 8
HEAD, CORDONED, GONE = "10.20.0.10", "10.20.0.24", "10.20.0.23"
MACHINES = tuple(f"10.20.0.{number}" for number in range(11, 23))
"""Those with accelerators that may be used."""
CORDON_REASON = "replacement of its power supply"

_ONE_NODE = {"workers_per_node": 8, "gpus_per_worker": 1, "cpus_per_worker": 4}
_BY_STEP = {"schedule": {"name": "cosine", "warmup_steps": 100}, "seed": 7}
_MODEL = {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "sequence_length": 4096}


def _recipe(owner: str, steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "labels": {"owner": owner},
        "recipe": "pretrain",
        "model": {"family": "llama", **_MODEL},
        "train": {"steps": steps, "global_batch": 64, "micro_batch": 2, **_BY_STEP},
        "parallel": {"dp_shard": 4, "tp": 2},
        "resources": _ONE_NODE,
        **changes,
    }


def _program(owner: str, ranks: int, **fields: Any) -> dict[str, Any]:
    return {
        "labels": {"owner": owner},
        "parallel": {"dp_shard": ranks},
        "resources": {**_ONE_NODE, "workers_per_node": min(ranks, GPUS)},
        **fields,
    }


SPECS: dict[str, dict[str, Any]] = {
    "mixtral-long-context": _recipe("grace", 50_000, parallel={"dp_shard": 16, "tp": 2}),
    "whisper-own-loop": _program("ada", 8, script="-m whisper_train --size small"),
    "llama-1b-pretrain": _recipe(
        "grace",
        4_000,
        parallel={"dp_shard": 16, "tp": 2},
        resources={**_ONE_NODE, "standby_nodes": 1},
        checkpoint={"remote": {"every_steps": 200, "keep": 3}},
    ),
    "nanogpt-own-script": _program(
        "ada", 4, command="python train_gpt.py --dataset shakespeare_char --batch 64"
    ),
    "t5-lightning-sft": _program(
        "barbara",
        8,
        script="-m finetune fit --config t5_base.yaml",
        program={"preload": ["lightning"], "steps": 6_000},
    ),
    "vit-memory-tier": _program("edsger", 8, script="-m vit.train --images /data/imagenet"),
    "olmo-elastic": _recipe(
        "margaret",
        8_000,
        parallel={"dp_shard": "auto", "tp": 2},
        resources={**_ONE_NODE, "nodes": {"min": 1, "max": 2}},
    ),
    "resnet-ray-train": _program(
        "barbara", 8, ray_train="train:train_loop_per_worker", code="ray_train"
    ),
    "dedup-ablation": _recipe("donald", 3_000),
    "spirals-function": {
        "labels": {"owner": "ada"},
        "function": "train:main",
        "code": "spirals",
        "config": {"width": 64, "lr": 0.003},
        "train": {"steps": 300, "global_batch": 256, "micro_batch": 64, "seed": 7},
        "parallel": {"dp_shard": 2},
        "resources": {**_ONE_NODE, "workers_per_node": 1},
    },
    "eval-harness": _program("donald", 2, command="bash run_eval.sh --suite commonsense"),
    "bert-own-loop": _program("margaret", 4, script="-m bert.pretrain --masks 0.15"),
    "tokenizer-sweep": _recipe("donald", 2_000),
}
"""By name; `code` names a folder of `examples`."""


def _incident(
    cause: Cause,
    action: Action,
    reason: str,
    evidence: tuple[str, ...],
    budget: Budget = Budget(),  # noqa: B008  (frozen)
    **fields: Any,
) -> IncidentRecord:
    return IncidentRecord(
        incident=0,
        cause=cause,
        decision=action,
        reason=reason,
        evidence=evidence,
        refused=(
            RefusedDecision(decision=Action.IGNORE, why="no correct step is made at present"),
            RefusedDecision(
                decision=Action.STOP, why="1 of 20 failures within the hour, so the job goes on"
            ),
        ),
        budget=budget,
        **fields,
    )


def _in_memory(ranks: int, *moved: int) -> dict[int, str]:
    return {rank: "partner_ram" if rank in moved else "own_ram" for rank in range(ranks)}


CRASH = _incident(
    Cause.WORKER_CRASH,
    Action.REPLACE_WORKER,
    "rank 5 crashed on a healthy node, so another process takes its rank",
    ("worker n0.a.5 (rank 5) was killed by signal 11", "rank 4: connection closed by peer"),
    lost=(LostItem(cause=Cause.WORKER_CRASH, rank=5, ranks=(5,), worker="n0.a.5", agent="n0"),),
    restored_step=299,
    steps_lost=1,
    tiers=_in_memory(32),
    phases_s={"detect": 0.02, "gather": 0.01, "fence": 0.04, "form": 0.3, "restore": 0.2},
)
NODE_LOST = _incident(
    Cause.NODE_LOST,
    Action.REPLACE_NODE,
    f"the node is lost, and standby {MACHINES[3]} is ready to take its ranks",
    (
        f"agent n3: its connection broke, and Ray reports that node ray-{GONE} is dead",
        "rank 23: connection reset by peer in reduce_scatter of dp_shard",
    ),
    lost=(LostItem(cause=Cause.NODE_LOST, ranks=tuple(range(24, 32)), agent="n3"),),
    restored_step=599,
    steps_lost=1,
    tiers=_in_memory(32, *range(24, 32)),
    phases_s={"detect": 1.8, "gather": 0.01, "fence": 0.05, "form": 1.9, "restore": 3.4},
)
OUT_OF_MEMORY = _incident(
    Cause.OUT_OF_MEMORY,
    Action.REPLACE_WORKER,
    "the kernel killed rank 2 because memory ran out; its node can run another process",
    ("worker n0.a.2 (rank 2) was killed by signal 9", "memory.events of its cgroup: oom_kill 1"),
    lost=(LostItem(cause=Cause.OUT_OF_MEMORY, rank=2, ranks=(2,), worker="n0.a.2", agent="n0"),),
    level=1,
    restored_step=200,
    steps_lost=37,
    phases_s={"detect": 0.03, "gather": 0.01, "fence": 0.05, "form": 6.2, "first_step": 4.1},
)
HANG = _incident(
    Cause.HANG,
    Action.REPLACE_WORKER,
    "rank 3 has been in step of step 341 for 31.0 s (limit 12.4 s)",
    ("rank 3: in step for longer than its limit, 31.0 s against 12.4 s", "7 ranks wait for rank 3"),
    lost=(LostItem(cause=Cause.HANG, rank=3, ranks=(3,), worker="n0.a.3", agent="n0"),),
    level=2,
    tiers=_in_memory(8),
    phases_s={"detect": 18.6, "gather": 0.01, "fence": 0.05, "decide": 0.01},
    suspects=(
        SuspectedRank(3, 0.91, ("7 ranks wait for it", "its stack differs"), "n0", worker="n0.a.3"),
    ),
    stacks=(
        SharedStack((3,), ("read (ssl.py:1138)", "fetch (vit/images.py:61)", "main (train.py:88)")),
        SharedStack(
            (0, 1, 2, 4, 5, 6, 7), ("all_reduce (distributed_c10d.py:2928)", "main (train.py:94)")
        ),
    ),
)
GROWTH = _incident(
    Cause.RESIZE,
    Action.GROW,
    "a larger mesh is worth the pause; the state is resharded from memory",
    ("16 ranks have room on 2 nodes since 30 s, in place of 8 ranks",),
    lost=(LostItem(cause=Cause.RESIZE),),
    budget=Budget(failures=0, without_progress=0),
    tiers=dict.fromkeys(range(16), "reshard"),
    phases_s={"detect": 0.01, "fence": 0.06},
)
SCRIPT_CRASH = _incident(
    Cause.WORKER_CRASH,
    Action.REPLACE_WORKER,
    "rank 1 crashed on a healthy node; all ranks start again",
    ("worker n0.a.1 (rank 1) was killed by signal 7",),
    lost=(LostItem(cause=Cause.WORKER_CRASH, rank=1, ranks=(1,), worker="n0.a.1", agent="n0"),),
    level=0,
    phases_s={"detect": 0.02, "gather": 0.01, "fence": 0.05, "form": 3.1},
)
FUNCTION_CRASH = _incident(
    Cause.WORKER_CRASH,
    Action.REPLACE_WORKER,
    "rank 1 crashed on a healthy node, so another process takes its rank",
    ("worker n1.a.1 (rank 1) was killed by signal 9",),
    lost=(LostItem(cause=Cause.WORKER_CRASH, rank=1, ranks=(1,), worker="n1.a.1", agent="n1"),),
    restored_step=119,
    steps_lost=1,
    tiers=_in_memory(2, 1),
    phases_s={"detect": 0.02, "gather": 0.01, "fence": 0.03, "form": 0.2, "restore": 0.1},
)
TRACEBACK = """Traceback (most recent call last):
  File "/workspace/bert/pretrain.py", line 141, in <module>
    main()
  File "/workspace/bert/pretrain.py", line 97, in main
    loss = criterion(model(batch), batch["labels"])
  File "/workspace/bert/data.py", line 33, in __getitem__
    return self.columns[name]
KeyError: 'labels'
"""
FAILURE = "rank 0 raised KeyError: 'labels' (bert/data.py:33 in __getitem__)"


def gpt_lines(count: int) -> Iterator[str]:
    yield "number of parameters: 10.65M"
    yield "compiling the model... (takes a ~minute)"
    for number in range(count):
        iteration = 10 * number
        loss = 1.32 + 2.9 / (1 + iteration / 180) ** 0.7
        time_ms = 178 + number % 9
        yield f"iter {iteration}: loss {loss:.4f}, time {time_ms:.2f}ms, mfu 31.{number % 7}%"


def training_lines(first: int, last: int) -> Iterator[str]:
    for step in range(first, last, 5):
        yield f"INFO step {step} loss {2 + 6 / (1 + step / 160) ** 0.52:.4f}"
    yield "WARNING the loader was late by 0.41 s"


EVAL_LINES = (
    "loading checkpoint /shared/checkpoints/llama-1b/step-00000400",
    "hellaswag: 10042 questions",
    "hellaswag: accuracy 0.4127",
    "winogrande: 1267 questions",
    "winogrande: accuracy 0.5351",
    "wrote results/commonsense.json",
)
